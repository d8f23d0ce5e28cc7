"""Texts that users write may begin with a byte order mark, as editors on Windows save them: they say the same as
without."""

from __future__ import annotations

import codecs

from specq.cli.parameters import read_grammar, read_schema
from specq.client import read_lines
from specq.config import load
from specq.config.values import read_tree
from specq.gateway.guard import ApiKeys, make_key
from specq.simulate.scenarios import read_measured, read_tables
from specq.transport.keys import make_keys, own_keys, read_grants


def marked(path):
    """Put a mark before a file's text."""
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())


def test_a_byte_order_mark_is_ignored(tmp_path):
    """Configurations, scenarios, trees, grammars, measured figures, and the files of both kinds of keys."""
    (tmp_path / "specq.toml").write_text("[broker]\nkeep_hours = 3\n")
    (tmp_path / "scenario.toml").write_text("[engine]\nstep_ms = 3\n")
    (tmp_path / "tree").write_text("[[0], [0, 0]]")
    (tmp_path / "grammar.json").write_text('{"json_object": true}')
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    (tmp_path / "measured.json").write_text('{"acceptance": 0.5}')
    key = make_key(tmp_path / "api.toml", "alice", max_priority=5)
    make_keys(tmp_path / "keys", "hub", ("broker",))
    readers = {
        "specq.toml": lambda path: load(path).broker.keep_hours,
        "scenario.toml": read_tables,
        "tree": lambda path: read_tree(str(path)),
        "grammar.json": lambda path: read_grammar(str(path)),
        "schema.json": lambda path: read_schema(str(path)),
        "measured.json": read_measured,
        "api.toml": lambda path: ApiKeys(path).caller(key),
        "keys/hub.pub": lambda path: [*read_grants(path.parent)],
        "keys/hub.secret": lambda path: own_keys(str(path.parent), "broker"),
    }
    for name, read in readers.items():
        path = tmp_path / name
        expected = read(path)
        marked(path)
        assert (path.read_bytes()[:3], read(path)) == (codecs.BOM_UTF8, expected)
    assert expected.secret_key


def test_a_byte_order_mark_before_prompts_is_ignored():
    """Also before a line that is blank, and where files were put one behind the other."""
    line = b'{"prompt": "a"}\n'
    for lines in ([line, line], [b"\n", line], [b"\r\n", line, line]):
        plain = [*read_lines(lines)]
        assert [*read_lines([codecs.BOM_UTF8 + lines[0], *lines[1:]])] == plain
        assert [*read_lines([codecs.BOM_UTF8 + one for one in lines])] == plain
        assert not any(one.error for one in plain)
