"""A headless Chromium over its debugging pipe: pages rendered with script off, at any width, light and dark."""

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)


# each word of the visible text that has letters on two lines, with a bar where it breaks
BROKEN_WORDS = r"""
(() => {
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const line = (node, at) => {
    const range = document.createRange();
    range.setStart(node, at);
    range.setEnd(node, at + 1);
    const box = range.getClientRects()[0];
    return box && box.width ? box.top + box.height / 2 : null;
  };
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const seen = node.parentElement.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
    if (!seen || node.parentElement.closest("svg, script, style")) continue;
    for (const match of node.data.matchAll(/\S+/g)) {
      const last = match.index + match[0].length - 1, first = line(node, match.index), end = line(node, last);
      if (first === null || end === null || Math.abs(first - end) < 5) continue;
      let at = match.index + 1;
      while (at < last && Math.abs((line(node, at) ?? first) - first) < 5) at++;
      found.push(match[0].slice(0, at - match.index) + "|" + match[0].slice(at - match.index));
    }
  }
  return found;
})()
"""


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One browser with one page, without scripts if none are asked for; a context manager that ends its process."""

    def __init__(self, scripts: bool = False):
        self.scripts = scripts

    def __enter__(self):
        self.profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        theirs_in, self.out = os.pipe()
        self.into, theirs_out = os.pipe()

        def ends():  # Chromium reads commands from descriptor 3 and answers on 4
            high = [os.dup(fd) for fd in (theirs_in, theirs_out)]
            for fd, number in zip(high, (3, 4), strict=True):
                os.dup2(fd, number)

        arguments = [
            str(find()),
            *QUIET,
            f"--user-data-dir={self.profile.name}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        nothing = subprocess.DEVNULL
        self.process = subprocess.Popen(
            arguments, preexec_fn=ends, close_fds=False, stdin=nothing, stdout=nothing, stderr=nothing
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.pending, self.number, self.examination = b"", 0, None
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self.examination = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self.send("Page.enable")
        self.send("Emulation.setScriptExecutionDisabled", value=not self.scripts)
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.into)
        self.profile.cleanup()

    def send(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.examination:
            message["sessionId"] = self.examination
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self.number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]

    def _read(self):
        while b"\0" not in self.pending:
            result = os.read(self.into, 1 << 20)
            if not result:
                raise RuntimeError("Chromium ended")
            self.pending += result
        line, _, self.pending = self.pending.partition(b"\0")
        return json.loads(line)

    def open(self, path: Path, width: int, scheme: str = "light") -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.send("Page.navigate", url=Path(path).resolve().as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def size(self) -> tuple[int, int]:
        """Width and height of the content, in CSS pixels."""
        content = self.send("Page.getLayoutMetrics")["cssContentSize"]
        return content["width"], content["height"]

    def broken_words(self, most: int = 30) -> list[str]:
        """Words of at most `most` characters that continue on another line: "wo|rd"; a break at a separator is none."""
        words = self.run(BROKEN_WORDS)
        return [word for word in words if len(word) <= most + 1 and not re.search(r"[\w)\]][-/_.,:=)]+\|", word)]

    def run(self, expression: str):
        """The value of an expression in the page; waits for a promise, which needs scripts."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=self.scripts)
        return result["result"].get("value")

    def type(self, text: str) -> None:
        """Type text where the focus is."""
        for key in text:
            self.send("Input.dispatchKeyEvent", type="keyDown", text=key, key=key)
            self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path: Path, most: int = 8000, top: int = 0) -> None:
        width, height = self.size()
        clip = {"x": 0, "y": top, "width": width, "height": min(height - top, most), "scale": 1}
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        Path(path).write_bytes(base64.b64decode(shot["data"]))
