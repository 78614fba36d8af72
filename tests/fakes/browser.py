"""Headless Chromium over its DevTools protocol: as much of a person at a browser as tests need."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
LIMIT_S = 120.0
_LOOK_EVERY_S = 0.05
_CLICKS = 5
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # the tests may run as root, and see only pages of their own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-extensions",
    "--no-first-run",
    "--remote-debugging-port=0",
)


def chromium() -> str | None:
    """The browser's program, None where there is none."""
    return next((found for found in map(shutil.which, NAMES) if found), None)


class PageError(AssertionError):
    """The page raised, or did not become what was waited for."""


class Browser:
    """Tabs of one browser, which share its cookies."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def tab(self, *, apart: bool = False) -> Tab:
        """A new tab; apart: of another person, who shares no cookies with the others."""
        context = {"browserContextId": self.send("Target.createBrowserContext")["browserContextId"]} if apart else {}
        target = self.send("Target.createTarget", url="about:blank", **context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable", session)
        return Tab(self, session)

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command and its result. Raises: PageError when it is refused."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        self._connection.send(json.dumps(message if session is None else {**message, "sessionId": session}))
        while True:
            answer: dict[str, Any] = json.loads(self._connection.recv(timeout=LIMIT_S))
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def listen(self, seconds: float) -> None:
        """Let time pass, and note what is told meanwhile. Pages that may run no script have no timers."""
        end = time.monotonic() + seconds
        with suppress(TimeoutError):
            while (left := end - time.monotonic()) > 0:
                self.events.append(json.loads(self._connection.recv(timeout=left)))


class Tab:
    """One page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def go(self, url: str) -> None:
        self._send("Page.navigate", url=url)
        self.wait("location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        found = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise PageError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until the page is loaded, its style too, and the expression is true. Raises: PageError with what it shows."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            with suppress(PageError):  # a page that is being left answers nothing
                if self.run(f"document.readyState === 'complete' && Boolean({condition})"):
                    return
            self._browser.listen(_LOOK_EVERY_S)
        raise PageError(f"{condition} did not come true; the page shows: {self.text()}")

    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    def click(self, selector: str) -> None:
        """With the mouse, where the element is; again where the page moved it away meanwhile.

        Raises: PageError when it could not be hit.
        """
        wanted = json.dumps(selector)
        for _ in range(_CLICKS):
            box = self.run(
                f"(() => {{ const found = document.querySelector({wanted}); found.scrollIntoView({{block: 'center'}});"
                f" window.hit = false; const note = (event) => {{ window.hit ||= event.target.closest({wanted}) !== null; }};"
                " document.addEventListener('click', note, {capture: true, once: true});"
                " const box = found.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
            )
            for kind in ("mousePressed", "mouseReleased"):
                self._send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)
            try:
                if self.run("window.hit") is not False:  # hit, or another page by now
                    return
            except PageError:
                return  # it is being left
        raise PageError(f"{selector} was missed {_CLICKS} times; the page shows: {self.text()}")

    def type(self, selector: str, text: str) -> None:
        """In place of what stands there."""
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self._send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """A key of the keyboard: `Tab` or `Enter`."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r")}[key]
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self._send("Input.dispatchKeyEvent", type="keyDown", text=text, **pressed)
        self._send("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def write(self, text: str) -> None:
        """Into whatever has the focus."""
        self._send("Input.insertText", text=text)

    def width(self, pixels: int) -> None:
        """Of the window."""
        self._send("Emulation.setDeviceMetricsOverride", width=pixels, height=800, deviceScaleFactor=1, mobile=False)

    def scripts(self, *, run: bool) -> None:
        """Whether pages that are loaded from now on may run theirs."""
        self._send("Emulation.setScriptExecutionDisabled", value=not run)

    def look(self, file: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """A picture of the whole page in a window of that width."""
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])
        image = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(image["data"]))

    def complaints(self) -> list[str]:
        """What went wrong on the page so far: errors that nobody caught, things that its policy forbade."""
        kinds = {"Runtime.exceptionThrown", "Log.entryAdded"}
        own = [e for e in self._browser.events if e.get("sessionId") == self._session and e["method"] in kinds]
        return [json.dumps(event["params"]) for event in own]

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **params)


@contextmanager
def browser(program: str, folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, which ends with the block."""
    process = subprocess.Popen(
        [program, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        with connect(_address(process, folder), max_size=None, open_timeout=LIMIT_S) as connection:
            yield Browser(connection)
            with suppress(ConnectionClosed):
                connection.send(json.dumps({"id": 0, "method": "Browser.close"}))
    finally:
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _address(process: subprocess.Popen[bytes], folder: Path) -> str:
    """Where it answers, which it writes down once it does."""
    end, file = time.monotonic() + LIMIT_S, folder / "DevToolsActivePort"
    while time.monotonic() < end and process.poll() is None:
        lines = file.read_text().split("\n") if file.is_file() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    raise PageError(f"Chromium did not start (exit code {process.poll()})")
