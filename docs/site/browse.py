"""Opens every page of the built site in a headless Chromium, as a phone and as a desktop: python docs/site/browse.py

A page must not be wider than the screen, and its console must stay without errors. Without a browser nothing is opened,
and the reason is printed. With `--pictures FOLDER` some pages are photographed, dark and light.
"""

import argparse
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from selenium.common.exceptions import TimeoutException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

SITE = Path(__file__).parents[2] / "site"
WIDTHS = {390: 844, 1280: 900}  # and heights, in pixels
PHOTOGRAPHED = ("index", "start", "idea", "is_it_for_me", "launching", "migrating", "api")
# The last four keep the browser from calling home; as root Chromium needs --no-sandbox.
ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic")
ARGUMENTS += (
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TOO_WIDE = """
const width = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth <= width) return null;
const wide = [...document.querySelectorAll("main *")].filter(x => x.getBoundingClientRect().right > width + 1);
const first = wide.slice(0, 3).map(x => x.outerHTML.slice(0, 80));
return document.documentElement.scrollWidth + " pixels: " + first.join(" | ");
"""
CODE_COLUMNS = 100  # of a frame of code, in a window of 1,280 pixels
COLUMNS = """
return [...document.querySelectorAll(".md-content pre > code")].map(code => {
  const style = getComputedStyle(code), canvas = document.createElement("canvas").getContext("2d");
  canvas.font = style.fontSize + " " + style.fontFamily;
  return (code.clientWidth - 2 * parseFloat(style.paddingLeft)) / canvas.measureText("m").width;
});
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which this process serves the folder, to this machine alone."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def why_no_browser() -> str | None:
    """Why there is no browser, or None."""
    if shutil.which("chromedriver") and (shutil.which("chromium") or shutil.which("google-chrome")):
        return None
    return "a browser needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"


@contextmanager
def browser() -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
            options.add_argument(argument)
        driver = Chrome(options, Service(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def be(driver: Chrome, width: int, scheme: str = "light") -> None:
    """Make the window this wide, for pages that are light or dark."""
    metrics = {
        "width": width,
        "height": WIDTHS[width],
        "deviceScaleFactor": 1,
        "mobile": width < 600,
    }
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})


def faults_of(driver: Chrome, address: str, name: str, width: int) -> Iterator[str]:
    driver.get(f"{address}/{name}")
    if too_wide := driver.execute_script(TOO_WIDE):
        yield f"{name} at {width}: {too_wide}"
    narrowest = min(driver.execute_script(COLUMNS), default=CODE_COLUMNS)
    if width == max(WIDTHS) and narrowest < CODE_COLUMNS:
        yield f"{name} at {width}: a frame of code has room for {narrowest:.0f} characters, not {CODE_COLUMNS}"
    errors = (entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE")
    # The browser asks for /favicon.ico by itself, where a page of plain HTML names no icon.
    yield from (
        f"{name} at {width}: {message}" for message in errors if "/favicon.ico" not in message
    )


def faults_of_the_search(driver: Chrome, address: str) -> Iterator[str]:
    """A word that pages have must be found."""
    driver.get(f"{address}/index.html")
    field = driver.find_element(By.CSS_SELECTOR, "input.md-search__input")
    field.click()
    field.send_keys("zigzag")
    try:
        WebDriverWait(driver, 10).until(
            lambda _: driver.find_elements(By.CSS_SELECTOR, "a.md-search-result__link")
        )
    except TimeoutException:
        yield "the search finds nothing"


def photograph(driver: Chrome, address: str, name: str, folder: Path) -> None:
    for width in WIDTHS:
        for scheme in ("light", "dark"):
            be(driver, width, scheme)
            driver.get(f"{address}/{name}.html")
            driver.save_screenshot(str(folder / f"{name}-{width}-{scheme}.png"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="photograph some pages into this folder"
    )
    given = parser.parse_args()
    names = sorted(
        path.relative_to(SITE).as_posix()
        for path in SITE.rglob("*.html")
        if path.name != "404.html"
    )
    if not names:
        sys.exit(f"no page in {SITE}: build the site first, with `make docs`")
    if reason := why_no_browser():
        print(f"no page was opened: {reason}")
        return 0
    with served(SITE) as address, browser() as driver:
        faults = []
        for width in WIDTHS:
            be(driver, width)
            faults += [fault for name in names for fault in faults_of(driver, address, name, width)]
        faults += faults_of_the_search(driver, address)
        if given.pictures:
            given.pictures.mkdir(parents=True, exist_ok=True)
            for name in PHOTOGRAPHED:
                photograph(driver, address, name, given.pictures)
    print(
        *faults,
        f"{len(names)} pages opened at {' and '.join(map(str, WIDTHS))} pixels: {len(faults)} faults",
        sep="\n",
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
