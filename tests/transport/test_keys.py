"""Key files: made safely, read strictly, and chosen without a guess."""

from __future__ import annotations

import os
import stat

import pytest

from specq.protocol.errors import ConfigError
from specq.transport.keys import AllowList, curve_to_broker, keys_of_gateway, make_keys, own_keys, readable_by_others
from tests.each import each


@pytest.fixture
def folder(tmp_path):
    """A directory with the keys of a broker and a drafter."""
    make_keys(tmp_path / "keys", "hub", ("broker",))
    make_keys(tmp_path / "keys", "laptop", ("draft",), trusted=True)
    return tmp_path / "keys"


def test_files_are_their_owners_alone(folder, tmp_path):
    """Mode 0600 in a directory of mode 0700, for any umask. The public file and log output contain no secret."""
    old = os.umask(0)
    try:
        open_to_all, _ = make_keys(tmp_path, "x", ("client",))
    finally:
        os.umask(old)
    assert stat.S_IMODE(open_to_all.stat().st_mode) == 0o600
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    secret = own_keys(str(folder), "draft").secret_key.decode()
    assert secret in (folder / "laptop.secret").read_text()
    assert secret not in (folder / "laptop.pub").read_text()
    curve = curve_to_broker(str(folder), "draft")
    assert curve.own.secret_key.decode() not in repr(curve)
    assert "laptop" in repr(curve)


def test_a_group_may_read_secrets_of_root_only():
    """As Kubernetes mounts them for a user: root's, mode 0440, in the user's group."""
    root, user, other = 0, 1000, 1001
    assert [readable_by_others(0o100440, owner, user) for owner in (root, user, other)] == [False, True, True]
    assert [readable_by_others(mode, root, user) for mode in (0o444, 0o460, 0o640)] == [True, True, False]
    assert [readable_by_others(mode, root, root) for mode in (0o440, 0o400)] == [True, False]


def test_a_secret_that_kubernetes_renews(folder, tmp_path):
    """It changes a link to a folder, and the links of the files stay."""
    mounted, data = tmp_path / "mounted", tmp_path / "mounted" / "..data"
    mounted.mkdir()
    data.symlink_to(folder)
    (mounted / "hub.pub").symlink_to("..data/hub.pub")
    (mounted / "laptop.pub").symlink_to("..data/laptop.pub")
    allowed = AllowList(mounted)
    before = allowed.grants["laptop"].public_key
    make_keys(tmp_path / "renewed", "laptop", ("draft",))
    (tmp_path / "renewed" / "hub.pub").write_bytes((folder / "hub.pub").read_bytes())
    (mounted / "..new").symlink_to(tmp_path / "renewed")

    (mounted / "..new").replace(data)
    allowed.refresh()

    assert allowed.grants["laptop"].public_key != before
    assert allowed.grants.keys() == {"hub", "laptop"}


def test_existing_keys_are_not_overwritten(folder):
    before = (folder / "laptop.secret").read_text()
    with pytest.raises(ConfigError, match=r"laptop\.secret already exists; choose another name"):
        make_keys(folder, "laptop", ("client",))
    assert (folder / "laptop.secret").read_text() == before


@each("name", ["", "../x", "a/b", ".hidden", "a b", "x" * 65])
def test_names_are_file_names(tmp_path, name):
    with pytest.raises(ConfigError, match="is not a valid name for keys"):
        make_keys(tmp_path, name, ("draft",))
    assert list(tmp_path.iterdir()) == []


def test_the_role_chooses_the_key(folder):
    """Of several keys of a role none is guessed; DIRECTORY/NAME names one."""
    assert own_keys(str(folder), "broker").name == "hub"
    assert own_keys(str(folder), "client", "draft").name == "laptop"
    make_keys(folder, "phone", ("draft",))
    with pytest.raises(ConfigError, match=r"keys/laptop or .*keys/phone"):
        own_keys(str(folder), "draft")
    assert own_keys(str(folder / "phone"), "draft").name == "phone"
    assert curve_to_broker("", "draft") is None
    with pytest.raises(ConfigError, match=r"neither a directory of keys .*/none nor a key .*; to create one: "):
        own_keys(str(folder / "none"), "client")


def test_a_gateway_takes_the_key_that_may_submit_for_tenants(folder):
    """Beside keys of other clients too, as `specq up --serve --keys DIRECTORY` finds them; of two such keys none is
    guessed."""
    keys = str(folder)
    make_keys(folder, "alice", ("client",))
    assert keys_of_gateway(keys) == f"{keys}/alice"
    make_keys(folder, "web", ("client",), tenants=True)
    assert own_keys(keys_of_gateway(keys), "client").name == "web"
    assert keys_of_gateway(f"{keys}/alice") == f"{keys}/alice"
    assert keys_of_gateway("") == ""
    (folder / "web.secret").unlink()
    assert keys_of_gateway(keys) == f"{keys}/alice"
    make_keys(folder, "api", ("client",), tenants=True)
    make_keys(folder, "more", ("client",), tenants=True)
    with pytest.raises(ConfigError, match=r"several keys of the role client; name one: .*keys/alice or .*keys/api"):
        keys_of_gateway(keys)


def _lines(path, *changes):
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda d: (d / "laptop.secret").chmod(0o640), "chmod 600"),
        (lambda d: (d / "laptop.secret").unlink(), "create one: specq keys"),
        (lambda d: (d / "laptop.secret").write_text("secret_key = ["), "is not valid TOML"),
        (lambda d: _lines(d / "laptop.secret", ("secret_key", "sekret_key")), "a key has roles"),
        (lambda d: _lines(d / "laptop.secret", ('["draft"]', '["drafter"]')), "of broker, target, draft, client"),
        (lambda d: (d / "hub.pub").unlink(), "the one broker to connect to; it has none"),
        (lambda d: make_keys(d, "other", ("broker",)), "it has hub, other"),
        (lambda d: (d / "copy.pub").write_text((d / "hub.pub").read_text()), "the same key as copy"),
    ],
)
def test_what_is_wrong_is_named_and_no_secret_is(folder, spoil, said):
    secret = own_keys(str(folder), "draft").secret_key.decode()
    spoil(folder)
    with pytest.raises(ConfigError, match=said) as raised:
        curve_to_broker(str(folder), "draft")
    assert secret not in str(raised.value)


def test_the_allow_list_follows_its_files(folder):
    """Keys are added and removed while it is in use. An unreadable file does not change it."""
    allowed = AllowList(folder)
    grants = allowed.grants
    assert {grant.name: (grant.roles, grant.trusted) for grant in grants.values()} == {
        "hub": (("broker",), False),
        "laptop": (("draft",), True),
    }
    assert sorted(AllowList(folder, "broker").grants) == ["hub"]
    key = grants["laptop"].public_key
    assert allowed.name_of(key) == "laptop"
    make_keys(folder, "alice", ("client", "draft"))
    (folder / "laptop.pub").unlink()
    allowed.refresh()
    assert (sorted(grants), allowed.name_of(key), grants["alice"].roles) == (["alice", "hub"], "", ("client", "draft"))
    (folder / "alice.pub").write_text("roles = []")
    with pytest.raises(ConfigError, match=r"alice\.pub"):
        allowed.refresh()
    assert sorted(grants) == ["alice", "hub"]


def test_a_key_that_takes_anothers_place_is_seen(folder, tmp_path):
    """Though the file has the same size and time of writing: written over, or moved there."""
    allowed, public = AllowList(folder), folder / "laptop.pub"
    for place, is_moved in enumerate((False, True)):
        make_keys(tmp_path / f"other{place}", "laptop", ("draft",), trusted=True)
        other, before = tmp_path / f"other{place}" / "laptop.pub", public.stat()
        os.utime(other, ns=(before.st_mtime_ns, before.st_mtime_ns))
        if is_moved:
            other.replace(public)
        else:
            public.write_text(other.read_text())
            os.utime(public, ns=(before.st_mtime_ns, before.st_mtime_ns))
        assert (public.stat().st_size, public.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        allowed.refresh()
        assert allowed.grants["laptop"].public_key.decode() in public.read_text()


def test_a_clients_key_may_have_a_higher_priority(tmp_path):
    """It stands in the public file, which the broker keeps; others cannot have one, and it has bounds."""
    make_keys(tmp_path, "alice", ("client",), max_priority=10)
    make_keys(tmp_path, "bob", ("client",))
    assert {name: grant.max_priority for name, grant in AllowList(tmp_path).grants.items()} == {"alice": 10, "bob": 0}
    with pytest.raises(ConfigError, match="only clients have priorities"):
        make_keys(tmp_path, "x", ("draft",), max_priority=1)
    with pytest.raises(ConfigError, match="from -1000 to 1000"):
        make_keys(tmp_path, "x", ("client",), max_priority=1001)
    (tmp_path / "bob.pub").write_text((tmp_path / "bob.pub").read_text() + "max_priority = 5000\n")
    with pytest.raises(ConfigError, match="is not a valid key file"):
        AllowList(tmp_path)
