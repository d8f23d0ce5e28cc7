"""A real deployment of `tiny` behind a gateway, and real headless Chromium: `make test-system` installs what it
takes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from specq.config import free_address
from specq.runtime.usage import reap
from specq.testing.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 90.0


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.system)


@pytest.fixture(scope="session")
def selenium():
    return pytest.importorskip("selenium", reason="`make test-system` installs it")


@pytest.fixture(scope="session")
def chromium():
    found = shutil.which("chromium"), shutil.which("chromedriver")
    if None in found:
        pytest.skip("no chromium with chromedriver; `make test-system` installs it")
    return found


@pytest.fixture(scope="session")
def axe() -> str:
    path = ROOT / ".system" / "node_modules" / "axe-core" / "axe.min.js"
    if not path.is_file():
        pytest.skip("no axe-core; `make test-system` installs it")
    return path.read_text("utf-8")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """`specq up --serve`, with a drafter and lookups."""
    with deployed(tmp_path_factory.mktemp("up")) as found:
        yield found


@contextmanager
def deployed(directory: Path, *options: str):
    """Yield where the page of a deployment is; it ends when the test does."""
    broker, bind = free_address(), free_address()
    config = directory / "up.toml"
    serve = f'[serve]\nbind = "{bind}"\nbatches = "{directory / "batches"}"\n'
    config.write_text(f'[target]\nmodel = "tiny"\n[up]\nserve = true\ndrafters = 1\n{serve}')
    command = [sys.executable, "-m", "specq", "up", "--config", str(config), "--broker", broker, "--journal", "none"]
    output = directory / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*command, *options], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: "\nready after" in output.read_text() or process.poll() is not None, PATIENCE_S)
        assert process.poll() is None, output.read_text()
        yield bind.replace("tcp://", "http://")
    finally:
        process.terminate()
        reap(process, 20)


@pytest.fixture
def browser(selenium, chromium):
    """A browser window of 1280 by 860 pixels."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium[0]
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromium[1]))
    try:
        yield driver
    finally:
        driver.quit()
