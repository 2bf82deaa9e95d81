"""The store: damaged files, deleted bundles, and counters that are never lowered."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.bundle.names import hex_digest
from agent.deploy.store import state_file
from agent.deploy.store.active import ActiveModel, read_active
from agent.deploy.store.part import Part, UrlVersion
from agent.deploy.store.state_file import MAX_STATE_BYTES, StateFile
from agent.deploy.store.store import PART_LIFETIME_S, Store
from agent.durable import write_durably
from agent.errors import EndlessDataError, StoreError
from agent.wire.reported import Origin
from tests.patience import PATIENCE_S

A, B, C = (f"sha256:{letter * 64}" for letter in "abc")


def model(digest: str, previous: str | None = None, name: str = "digits") -> ActiveModel:
    return ActiveModel(name, digest, "1.0.0", Origin.DESIRED, "job-1", previous)


def put(store: Store, *digests: str) -> None:
    for digest in digests:
        store.bundle_path(digest).write_bytes(b"bundle")


@pytest.mark.parametrize(
    "digest", ["", "sha256:", "sha256:" + "A" * 64, "sha256:../../x", "md5:" + "a" * 64, A + "\n"]
)
def test_malformed_digest_never_becomes_a_path(digest: str) -> None:
    with pytest.raises(ValueError, match="expected sha256"):
        hex_digest(digest)


def test_what_is_active_survives_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    put(store, A, B)
    store.switch(model(A))
    store.switch(model(B, A))
    assert dict(Store(tmp_path / "state").active()) == {"digits": model(B, A)}


def test_a_late_record_does_not_undo_a_switch(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, A, B)
    store.switch(model(A))
    judged = store.active()["digits"]
    store.switch(model(B, A))  # while the disk delayed the record of what was judged
    store.record(replace(judged, version="1.0.1"), instead_of=judged)
    assert store.active()["digits"] == Store(tmp_path).active()["digits"] == model(B, A)
    now = store.active()["digits"]
    store.record(replace(now, version="1.0.1"), instead_of=now)
    assert Store(tmp_path).active()["digits"].version == "1.0.1"


def test_a_bundle_that_is_not_there_cannot_become_active(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    with pytest.raises(StoreError, match="not in the store"):
        store.switch(model(A))
    assert not (tmp_path / "state/active.json").exists()


@pytest.mark.parametrize("name", ["active.json", "counters.json"])
@pytest.mark.parametrize("damage", [b"", b"{", b"null", b"[" * 9999, b'{"sha256":"00","body":{}}', "flip"])
def test_damaged_file_is_renamed_and_its_mirror_used(tmp_path: Path, name: str, damage: bytes | str) -> None:
    store = Store(tmp_path / "state")
    put(store, A)
    store.switch(model(A))
    store.commit_counter("digits", 7)
    path = tmp_path / "state" / name
    if isinstance(damage, str):
        raw = bytearray(path.read_bytes())
        raw[-20] ^= 1
        damage = bytes(raw)
    path.write_bytes(damage)
    again = Store(tmp_path / "state")
    assert again.active()["digits"].digest == A
    assert again.committed_counter("digits") == 7
    assert path.with_name(f"{name}.corrupt").read_bytes() == damage


def test_both_copies_damaged_leave_an_empty_store_and_not_a_dead_agent(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    put(store, A)
    store.switch(model(A))
    for name in ("active.json", "active.json.mirror"):
        (tmp_path / "state" / name).write_bytes(b"\x00" * 100)
    again = Store(tmp_path / "state")
    assert dict(again.active()) == {}
    again.switch(model(A))
    assert Store(tmp_path / "state").active()["digits"].digest == A


def test_every_flipped_bit_of_a_state_file_is_noticed(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "a.json", mirrored=False)
    file.save({"digits": 3})
    good = (tmp_path / "a.json").read_bytes()
    for bit in range(8 * len(good)):
        raw = bytearray(good)
        raw[bit // 8] ^= 1 << bit % 8
        (tmp_path / "a.json").write_bytes(raw)
        # White space around the document may change, its content may not.
        assert StateFile(tmp_path / "a.json", mirrored=False).load() in (None, {"digits": 3})


def test_a_counter_never_goes_down(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    store.commit_counter("digits", 7)
    store.commit_counter("digits", 3)
    store.commit_counter("faces", 0)
    assert store.committed_counter("digits") == 7
    again = Store(tmp_path / "state")
    assert (again.committed_counter("digits"), again.committed_counter("faces")) == (7, 0)
    assert again.committed_counter("other") is None


def test_an_older_copy_of_the_counters_does_not_lower_them(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    store.commit_counter("digits", 1)
    old = (tmp_path / "state/counters.json").read_bytes()
    store.commit_counter("digits", 2)
    (tmp_path / "state/counters.json").write_bytes(old)
    assert Store(tmp_path / "state").committed_counter("digits") == 2


def test_only_the_malformed_active_entry_is_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    put(store, A, B)
    store.switch(model(A))
    store.switch(model(B, name="faces"))
    body = json.loads((tmp_path / "state/active.json").read_text())["body"]
    body["digits"]["digest"] = "../../etc/passwd"
    StateFile(tmp_path / "state/active.json", mirrored=True).save(body)
    assert list(Store(tmp_path / "state").active()) == ["faces"]


def test_what_is_in_use_is_not_collected(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    digests = [f"sha256:{letter * 64}" for letter in "abcdef"]
    put(store, *digests)
    store.bundle_path(digests[5]).rename(store.bundle_path(digests[5]).with_suffix(".corrupt"))
    store.switch(model(digests[1], previous=digests[0]))
    freed = store.collect({digests[2]})
    assert sorted(path.name[0] for path in (tmp_path / "state/store").iterdir()) == ["a", "b", "c"]
    assert freed == 3 * len(b"bundle")


def test_an_unfinished_transfer_is_kept_for_a_week(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    with store.open_part(A, 10) as part:
        part.append(b"12345")
    written = store.part_path(A).stat().st_mtime
    store.collect(set(), now=written + PART_LIFETIME_S - 1)
    assert store.part_bytes(A) == 5
    store.collect({A}, now=written + PART_LIFETIME_S + 1)
    assert store.part_bytes(A) == 5
    store.collect(set(), now=written + PART_LIFETIME_S + 1)
    assert store.part_bytes(A) == 0


@pytest.mark.slow
def test_readers_see_the_old_or_the_new_state_while_it_is_switched(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    put(store, A, B)
    store.switch(model(A))
    pid = os.fork()
    if pid == 0:
        for turn in range(100):
            store.switch(model(B if turn % 2 else A))
        os._exit(0)
    seen = set()
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        document = StateFile(tmp_path / "state/active.json", mirrored=False).load()
        assert isinstance(document, dict)
        seen.add(document["digits"]["digest"])
    assert seen <= {A, B}
    assert not list((tmp_path / "state").glob("*.corrupt"))


def test_part_resumes_and_never_grows_beyond_its_size(tmp_path: Path) -> None:
    path = tmp_path / "part"
    with Part(path, 10) as part:
        part.append(b"12345")
        part.set_origin(UrlVersion("https://a.example/b", '"v1"'))
    with Part(path, 10) as part:
        assert part.written == 5
        assert part.origin() == UrlVersion("https://a.example/b", '"v1"')
        part.append(b"67890")
        with pytest.raises(EndlessDataError):
            part.append(b"X")
        part.restart()
        assert part.origin() is None
    assert path.read_bytes() == b""


def test_part_of_another_size_starts_over(tmp_path: Path) -> None:
    with Part(tmp_path / "part", 10) as part:
        part.append(b"1234567890")
    with Part(tmp_path / "part", 5) as part:
        assert part.written == 0


def test_a_part_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "part").symlink_to(tmp_path / "secret")
    with pytest.raises(StoreError):
        Part(tmp_path / "part", 10)
    assert (tmp_path / "secret").read_bytes() == b"secret"


@given(st.binary(max_size=100))
def test_origin_of_a_part_may_hold_any_bytes(raw: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part"
        path.with_name("part.origin").write_bytes(raw)
        with Part(path, 10) as part:
            origin = part.origin()
            assert origin is None or isinstance(origin.url, str)


def test_state_over_its_limit_is_refused_before_it_is_written(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "a.json", mirrored=True)
    file.save({"a": 1})
    with pytest.raises(StoreError, match="at most"):
        file.save({"a": "x" * MAX_STATE_BYTES})
    assert file.load() == {"a": 1}


def test_state_of_a_newer_agent_is_refused_and_not_touched(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    store.lock()
    store.unlock()
    assert (tmp_path / "state/format").read_text() == "1\n"
    Store(tmp_path / "state")  # written by this agent: accepted

    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "format").write_text("2\n")
    with pytest.raises(StoreError, match="written by a newer agent: expected format 1 at most, got '2'"):
        Store(newer)
    assert [path.name for path in newer.iterdir()] == ["format"]


def test_active_models_are_read_without_changing_anything(tmp_path: Path) -> None:
    root = tmp_path / "state"
    store = Store(root)
    assert read_active(root) == {}
    put(store, A)
    store.switch(model(A))
    assert read_active(root) == {"digits": model(A)}
    damaged = b'{"body":1}'
    (root / "active.json").write_bytes(damaged)
    assert read_active(root) == {"digits": model(A)}
    assert (root / "active.json").read_bytes() == damaged


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_save_that_hangs_and_ends_late_does_not_undo_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirrored: bool
) -> None:
    hangs, back = threading.Event(), threading.Event()

    def writing(path: Path, data: bytes) -> None:
        if not hangs.is_set():
            hangs.set()
            assert back.wait(PATIENCE_S)
        write_durably(path, data)

    monkeypatch.setattr(state_file, "write_durably", writing)
    file = StateFile(tmp_path / "desired.json", mirrored=mirrored)
    late = threading.Thread(target=file.save, args=({"version": 8},))
    late.start()
    assert hangs.wait(PATIENCE_S)
    file.save({"version": 9})
    back.set()
    late.join()
    assert file.load_all() == [{"version": 9}] * (1 + mirrored)


def test_a_fifo_in_place_of_the_record_holds_up_nobody(tmp_path: Path) -> None:
    """`edge-agent check` reads the folder of another user as root."""
    os.mkfifo(tmp_path / "active.json")
    found: list[object] = []
    reading = threading.Thread(target=lambda: found.append(read_active(tmp_path)), daemon=True)
    reading.start()
    reading.join(PATIENCE_S)
    assert found == [{}]
