"""The check of the built site, which `make docs` runs, notices each kind of fault."""

from links import faults_of


def test_faults_of_a_site_are_noticed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "sound.html").write_text(
        '<h1 id="here">A</h1> <a href="#here">1</a> <a href="../b%20c.html#there">2</a>'
    )
    (tmp_path / "b c.html").write_text(
        '<p id="there"></p> <a href="https://example.org/x">1</a> <img src="picture.png">'
    )
    (tmp_path / "picture.png").touch()
    assert list(faults_of(tmp_path)) == []
    (tmp_path / "faulty.html").write_text(
        '<a href="gone.html">1</a> <a href="#nowhere">2</a> <a href="a/sound.html#there">3</a> <link href="gone.css">'
        '<script src="https://example.org/x.js"></script> <link href="//example.org/x.css">'
    )
    assert sorted(faults_of(tmp_path)) == [
        "faulty.html loads //example.org/x.css from elsewhere",
        "faulty.html loads https://example.org/x.js from elsewhere",
        "faulty.html refers to #nowhere: no such anchor",
        "faulty.html refers to a/sound.html#there: no such anchor",
        "faulty.html refers to gone.css: no such file",
        "faulty.html refers to gone.html: no such file",
    ]
