"""The page in Chromium, in front of a real deployment: what a user sees, with mouse and without, wide and narrow."""

from __future__ import annotations

import re

import httpx2
import pytest

from tests.system.conftest import deployed

pytestmark = pytest.mark.timeout(240)
WIDE, NARROW = (1280, 860), (390, 844)
PATIENCE_S = 60.0
PROMPT = "Once upon a time there was a little dog, and the little dog"

SHOW_TWO_REPORTS = """
    const [first, second, done] = arguments;
    import("/page/map.js").then(async ({ WorkMap }) => {
        const parent = document.createElement("div"), map = new WorkMap(parent);
        map.show(first);
        await new Promise(requestAnimationFrame);
        map.show(second);
        const cells = [...parent.querySelectorAll("tbody tr td:last-child")].map((cell) => cell.textContent);
        done({ picture: parent.querySelector("svg").innerHTML, cells });
    }).catch((error) => done({ picture: String(error) }));
"""


class Page:
    """The page as its user sees it."""

    def __init__(self, browser, url, size=WIDE, scheme="light") -> None:
        self.browser = browser
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == NARROW}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        browser.get(url)

    def wait(self, condition):
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.browser, PATIENCE_S, poll_frequency=0.05).until(lambda _: condition())

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def one(self, selector):
        return self.browser.find_element("css selector", selector)

    def ready(self):
        self.wait(lambda: "is-ready" in self.one("#state").get_attribute("class"))
        return self

    def set(self, **values):
        """Set values as a user would who types them into the form."""
        self.one("#open-settings").click()
        for name, value in values.items():
            field = self.one(f"#set-{name}")
            if field.tag_name != "select":
                field.clear()
            field.send_keys(str(value))
        self.one("#settings .main").click()

    def ask(self, text=PROMPT):
        """Send a message and wait for the whole answer."""
        from selenium.webdriver.common.keys import Keys

        self.one("#prompt").send_keys(text + Keys.ENTER)
        self.whole()

    def whole(self):
        self.wait(lambda: self.one("#send").is_displayed() and (self.all(".answer .token") or self.one("#error").text))
        assert not self.one("#error").text

    def press(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()

    def back(self):
        """Press Tab with Shift."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        ActionChains(self.browser).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()

    def focused(self):
        return self.browser.switch_to.active_element

    def faults(self, axe):
        """Return what axe-core calls serious or critical."""
        self.browser.execute_script(axe)
        found = self.browser.execute_async_script("axe.run().then(arguments[0], (e) => arguments[0]({error: `${e}`}))")
        assert "violations" in found, found
        bad = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
        return [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in bad]

    def complaints(self):
        """Return what the browser wrote to its console: a foreign host or inline script would be here."""
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_a_chat_shows_where_its_tokens_come_from(browser, url):
    """Each token has an origin; shapes differ; the drafts that were rejected beside one can be seen; numbers come
    beside it."""
    page = Page(browser, url).ready()
    page.set(temperature=0, max_tokens=60, seed=7)
    page.ask()
    tokens = page.all(".answer .tokens > .token")
    classes = {token.get_attribute("class").split()[1] for token in tokens}
    assert classes <= {"o-worker", "o-suffix", "o-corrected", "o-plain"}
    assert len(classes) > 1
    lines = [f"border-{side}-style" for side in ("bottom", "top")]
    shapes = [tuple(map(sample.value_of_css_property, lines)) for sample in page.all("#legend .token")]
    assert len(set(shapes)) == len(shapes)
    assert "tokens per round" in page.one("#figures").text
    assert len(page.all("#figures svg")) == 2
    for _ in range(3):  # on a busy machine the drafts of one answer may all be late
        if rejected := page.all(".answer .has-rejected"):
            break
        page.ask()
    assert rejected
    browser.execute_script("arguments[0].click()", rejected[0])
    assert "Rejected here" in page.one(".explained").text
    assert not page.one(".drafts").is_displayed()
    page.one("#show-rejected").click()
    assert page.one(".drafts del").is_displayed()
    assert page.complaints() == []


def test_batches_are_shown(browser, url):
    """Only where there are some."""
    page = Page(browser, url).ready()
    assert not page.one("#batches").is_displayed()
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 4}}'
    with httpx2.Client(base_url=url, trust_env=False, timeout=PATIENCE_S) as http:
        file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", line)}).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
        batch = http.post("/v1/batches", json=body).json()
    page.wait(lambda: "completed" in page.one("#batches").text)
    assert batch["id"][:14] in page.one("#batches").text
    assert "1/1" in page.one("#batches").text
    assert page.complaints() == []


def test_an_answer_that_was_cut_says_so(browser, url):
    """And where to change that; one that came to its end says nothing."""
    page = Page(browser, url).ready()
    page.set(temperature=0, max_tokens=5)
    page.ask()
    page.wait(lambda: page.all(".answer .cut"))
    assert page.one(".answer .cut").text.startswith("Cut here, after 5 tokens.")
    page.one("#open-settings").click()
    assert "is cut there" in page.one("#set-max_tokens-hint").text


def test_a_plain_run_gives_the_same_text(browser, url):
    """With the seed of the answer. The measured speedup is shown, high or low."""
    page = Page(browser, url).ready()
    page.set(temperature=0.8, max_tokens=40)
    page.ask()
    page.one("#compare").click()
    page.wait(lambda: page.all("#comparison .same, #comparison .differs"))
    assert "The texts are the same" in page.one("#comparison").text
    assert "tokens/s" in page.one("#comparison .ratio").text
    assert page.complaints() == []


def test_the_map_shows_who_works(browser, url):
    """And what comes from the broker later: jobs that have ended."""
    page = Page(browser, url).ready()
    names = [row.text.split()[0] for row in page.all("#map tbody tr")]
    assert names == ["target-1", "draft-1"]
    page.ask()
    page.wait(lambda: "0 finished" not in page.one("#map .quiet").text)
    assert page.complaints() == []


def test_the_map_shows_who_drafts_for_whom(browser, url):
    """From two reports of a broker: whether a real draft worker's tokens are accepted depends on the machine's load."""
    Page(browser, url).ready()
    drawn = browser.execute_async_script(SHOW_TWO_REPORTS, *(_report(accepted) for accepted in (3, 1003)))
    assert "<title>draft-1 drafts for target-1: " in drawn["picture"]
    assert drawn["picture"].count("drafts for") == 1  # target-9 has left
    target_1, target_9 = drawn["cells"][-1].split(", ")
    assert target_9 == "target-9 (0)"
    assert int(re.fullmatch(r"target-1 \((\d+)\)", target_1)[1]) > 0


def _report(accepted):
    """What the broker reports of a verifier, and of a draft worker for it and for one that has left."""
    common = {"state": "ready", "jobs": 1, "steps": 5, "model": "tiny"}
    target = {"name": "target-1", "role": "target", "incarnation": "a", **common, "metrics": {}}
    drafter = {"name": "draft-1", "role": "draft", "incarnation": "b", **common, "drafts_for": {"target-1": 1}}
    drafter["metrics"] = {"accepted_for": {"target-9": 7, "target-1": accepted}}
    jobs = {"running": 1, "waiting": 0, "finished": 0}
    return {"workers": [drafter, target], "jobs": jobs, "journal": {"records": 0}}


def test_settings_are_kept_and_sent(browser, url):
    """Mode plain has no drafts; a wrong setting does not leave the form; what the gateway refuses is said in its
    words."""
    page = Page(browser, url).ready()
    page.set(mode="plain", max_tokens=12)
    browser.refresh()
    page.ready().ask()
    tokens = page.all(".answer .tokens > .token")
    assert len(tokens) <= 13
    assert {token.get_attribute("class") for token in tokens} == {"token o-plain"}
    page.set(temperature=1000)
    assert page.one("#set-temperature:invalid").is_displayed()
    page.one("#reset").click()
    page.one("#settings .main").click()
    browser.execute_script("document.getElementById('prompt').value = 'word '.repeat(9000)")
    page.one("#send").click()
    page.wait(lambda: page.one("#error").text)
    assert "tokens" in page.one("#error").text


def test_everything_works_by_keyboard(browser, url):
    """From the skip link to the prompt, through an answer, to the settings and back."""
    from selenium.webdriver.common.keys import Keys

    page = Page(browser, url).ready()
    page.press(Keys.TAB)
    assert page.focused().text == "Skip to the prompt"
    page.press(Keys.ENTER)
    page.press(PROMPT, Keys.ENTER)
    page.whole()
    assert page.focused().get_attribute("id") == "prompt"
    page.back()
    assert "tokens" in page.focused().get_attribute("class")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.one(".is-current").get_attribute("data-place") == "1"
    assert page.one(".explained").text
    browser.execute_script("document.getElementById('open-settings').focus()")
    page.press(Keys.ENTER)
    assert page.one("#settings").is_displayed()
    page.press(Keys.ESCAPE)
    page.wait(lambda: not page.one("#settings").is_displayed())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_it_is_accessible_and_fits(browser, url, axe, size, scheme):
    """Empty, with an answer and its rejected drafts, and in the settings."""
    page = Page(browser, url, size, scheme).ready()
    assert page.faults(axe) == []
    page.ask()
    browser.execute_script("document.getElementById('show-rejected').click()")
    browser.execute_script("document.querySelector('.tokens > .token').click()")
    assert page.faults(axe) == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
    browser.execute_script("document.getElementById('open-settings').click()")
    assert page.faults(axe) == []


def test_markup_of_a_message_stays_text(browser, url):
    """A question with markup is shown as it is; nothing of it becomes an element."""
    page = Page(browser, url).ready()
    markup = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    page.ask(markup)
    assert page.one(".question").text == markup
    assert browser.title == "specq"
    assert page.all("#messages img, #messages script") == []


def test_with_api_keys_the_page_asks_for_one(browser, tmp_path):
    """And works with it; the key is in no storage that outlives the tab."""
    from specq.gateway.guard import make_key

    key = make_key(tmp_path / "api.toml", "alice")
    with deployed(tmp_path, "--api-keys", str(tmp_path / "api.toml")) as url:
        page = Page(browser, url)
        page.wait(lambda: page.one("#state").text.endswith("needs an API key"))
        page.one("#prompt").send_keys("Hello\n")
        page.wait(lambda: page.one("#set-key").is_displayed())
        page.one("#set-key").send_keys(key)
        page.one("#settings .main").click()
        page.ready()
        # chromedriver's keys do not reach the prompt here, it is not known why: the text is put there
        browser.execute_script("document.getElementById('prompt').value = 'Hello'")
        browser.execute_script("document.getElementById('send').click()")
        page.whole()
        assert key not in browser.execute_script("return JSON.stringify(localStorage)")


def test_a_schema_makes_answers_json(browser, url):
    """The box is closed at first. A schema that is not JSON is refused in the gateway's words."""
    page = Page(browser, url).ready()
    page.set(temperature=0, max_tokens=60)
    assert not page.one("#schema").is_displayed()
    page.one(".schema summary").click()
    page.one("#schema").send_keys('{"type": "object", "properties": {"b": {"type": "boolean"}, "2": {"enum": ["x"]}}, ')
    page.one("#prompt").send_keys(PROMPT + "\n")
    page.wait(lambda: "structured_outputs.json is not valid JSON" in page.one("#error").text)
    page.one("#schema").send_keys('"required": ["b", "2"], "additionalProperties": false}')
    assert page.one("#schema-state").text == "given"
    page.ask()
    text = page.all(".answer .tokens")[-1].text
    assert text in ('{"b": true, "2": "x"}', '{"b": false, "2": "x"}')
    assert page.all(".answer .o-grammar")
    page.one("#compare").click()
    page.wait(lambda: page.all("#comparison .same, #comparison .differs"))
    assert "The texts are the same" in page.one("#comparison").text
    assert len(page.complaints()) == 1, "the refusal"
