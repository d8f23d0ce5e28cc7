"""Users read one name for each source of drafts, wherever they look."""

from __future__ import annotations

import re
from pathlib import Path

from specq.chat.pen import MARKS
from specq.doctor.prediction import NAMES, WORKER
from specq.protocol.origins import LOOKUP, ORIGINS, OWN, PLAIN, SHOWN, TARGETS_OWN
from specq.verifier.sources.source_clock import LANES_OF
from tests.each import each

SOURCES = [name for name in ORIGINS if name not in TARGETS_OWN]
PAGE = (Path(__file__).parents[2] / "specq/gateway/page/origins.js").read_text("utf-8")


@each("origin", SOURCES)
def test_chat_page_and_doctor_use_it(origin: str) -> None:
    """A table of their own says how it looks, not what it is called."""
    assert re.findall(rf'^  "?{origin}"?: \["\w+", "([^"]*)", ', PAGE, re.MULTILINE) == [SHOWN[origin]]
    assert SHOWN[origin] in NAMES.get(origin, SHOWN[origin])
    assert SHOWN[origin] in MARKS[origin].meaning or origin == "drafted"


def test_only_sources_have_a_display_name() -> None:
    """By what tokens say of their origin, and by what verifiers count. A worker has its own row; plain decoding and the
    target's own tokens are no drafts."""
    assert set(SHOWN) == {*SOURCES, *LANES_OF}
    assert NAMES[WORKER] == "one draft worker"
    assert not {PLAIN, OWN} & set(SHOWN)
    assert SHOWN[LOOKUP] == SHOWN["suffix"]
