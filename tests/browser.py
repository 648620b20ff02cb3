"""A headless Chromium, driven by its chromedriver over HTTP (https://www.w3.org/TR/webdriver2/).

Six kinds of requests, for which selenium would be 12 MB and its dependencies.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

FLAGS = [
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def why_not() -> str | None:
    """Why there is no browser, or None."""
    browsers = ("chromium", "chromium-browser", "google-chrome")
    if shutil.which("chromedriver") and any(map(shutil.which, browsers)):
        return None
    return "needs a browser: chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"


class Browser:
    """One session. What the driver refuses is a RuntimeError with its message."""

    def __init__(self, url: str, profile: Path) -> None:
        self._url, self._open = url, build_opener(ProxyHandler({})).open
        flags = [*FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        wanted = {"goog:chromeOptions": {"args": flags}, "goog:loggingPrefs": {"browser": "ALL"}}
        found = self._post("session", {"capabilities": {"alwaysMatch": wanted}})
        self._url = f"{url}/session/{found['sessionId']}"

    def open(self, page: Path, width: int, *, is_dark: bool = False) -> None:
        """Load a page in a window of this width in CSS pixels."""
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.command("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._post("url", {"url": page.resolve().as_uri()})

    def run(self, script: str) -> Any:
        return self._post("execute/sync", {"script": script, "args": []})

    def console(self) -> list[str]:
        """What the page has written, and what could not be loaded."""
        return [entry["message"] for entry in self._post("se/log", {"type": "browser"})]

    def command(self, name: str, arguments: dict[str, Any]) -> Any:
        """A command of the Chrome DevTools protocol."""
        return self._post("goog/cdp/execute", {"cmd": name, "params": arguments})

    def close(self) -> None:
        self._open(Request(self._url, method="DELETE"), timeout=30).close()

    def _post(self, path: str, content: dict[str, Any]) -> Any:
        request = Request(f"{self._url}/{path}", json.dumps(content).encode(), {"Content-Type": "application/json"})
        try:
            with self._open(request, timeout=30) as answer:
                return json.load(answer)["value"]
        except HTTPError as error:
            raise RuntimeError(f"chromedriver, {path}: {json.load(error)['value']['message']}") from error


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser whose profile is this new folder. It and its driver are ended afterwards."""
    command = ["chromedriver", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        try:
            assert driver.stdout is not None
            ports = (found for line in driver.stdout for found in re.findall(r"on port (\d+)\.", line))
            session = Browser(f"http://127.0.0.1:{next(ports, 0)}", profile)
            try:
                yield session
            finally:
                session.close()
        finally:
            driver.terminate()
