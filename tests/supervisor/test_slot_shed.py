"""Optional features that a model died with twice: off for the next workers, said aloud, and back after a reset or a change."""

from __future__ import annotations

from dataclasses import replace

from supervisor.slot_events import (
    Event,
    LoadRequested,
    ModelCost,
    ModelsChanged,
    Remember,
    RememberShed,
    ResetRequested,
    SlotState,
)
from supervisor.slot_rules import Timers
from tests.supervisor.slot_stage import Stage

BARE = ModelCost("a", 4, load_key="bare", kv_bytes=1)
A = ModelCost("a", 6, load_key="full", kv_bytes=2, features=("draft_model", "kv_bits"), without=BARE)


def stage(timers: Timers | None = None) -> Stage:
    return Stage([A, ModelCost("b", 1)], timers=timers)


def live(on: Stage) -> str:
    """Loads it; the load key of its worker, by what the ledger is charged."""
    on.do(LoadRequested("a", None))
    on.wait(2.5)
    on.come_up("a")
    return {6: "full", 4: "bare"}[on.slot("a").charged_bytes]


def die(on: Stage) -> None:
    on.exit("a", code=1, tail="boom")


def test_after_two_deaths_the_next_worker_is_started_without_and_it_is_said() -> None:
    on = stage()
    assert live(on) == "full"
    die(on)
    assert live(on) == "full" and on.slot("a").shed == ()
    die(on)
    (said,) = [effect for effect in on.all if isinstance(effect, Event) and effect.kind == "shed"]
    assert said.data["features"] == ["draft_model", "kv_bits"]
    assert "died 2 times with draft_model and kv_bits" in on.slot("a").last_error
    assert on.slot("a").last_error.endswith("boom")
    on.wait(2)
    assert live(on) == "bare" and on.slot("a").shed == ("draft_model", "kv_bits")


def test_deaths_far_apart_and_those_of_a_model_without_features_shed_nothing() -> None:
    on = stage(Timers(crash_window_s=10))
    for _ in range(3):
        assert live(on) == "full"
        die(on)
        on.wait(11)
    assert on.slot("a").shed == ()
    plain = Stage([BARE])
    for _ in range(2):
        plain.do(LoadRequested("a", None))
        plain.wait(3)
        die(plain)
    assert plain.slot("a").shed == ()


def shed() -> Stage:
    on = stage()
    for _ in range(2):
        live(on)
        die(on)
    on.wait(3)
    assert live(on) == "bare"
    return on


def remembered(on: Stage) -> list[RememberShed]:
    return [effect for effect in on.all if isinstance(effect, RememberShed)]


def test_it_is_remembered_beyond_the_server_until_a_reset_or_other_settings() -> None:
    on = shed()
    assert remembered(on) == [RememberShed("a", "full", True)]
    on.do(ResetRequested("a", None))
    assert remembered(on)[1:] == [RememberShed("a", "full", False)]
    on = shed()
    on.do(ModelsChanged((replace(A, load_key="other"), ModelCost("b", 1))))
    assert not remembered(on)[-1].shed


def test_what_an_earlier_server_found_out_holds_from_the_first_load_on() -> None:
    on = Stage([replace(A, known_shed=True)])
    (said,) = [effect for effect in on.all if isinstance(effect, Event) and effect.kind == "shed"]
    assert "without until: omlxctl reset a" in on.slot("a").last_error == said.data["message"]
    assert live(on) == "bare" and on.slot("a").shed == ("draft_model", "kv_bits")
    on.do(ModelsChanged((replace(A, known_shed=True),)))
    assert on.slot("a").shed == ("draft_model", "kv_bits")
    on.do(ResetRequested("a", None))
    on.wait(1)
    on.exit("a", code=0)
    assert live(on) == "full"


def test_a_reset_makes_the_bare_worker_stale_and_the_next_one_has_all_features() -> None:
    on = shed()
    on.do(ResetRequested("a", None))
    assert on.slot("a").shed == () and on.state("a") is SlotState.STOPPING
    on.exit("a", code=0)
    assert live(on) == "full"
    die(on)
    assert on.slot("a").shed == (), "the deaths before the reset are forgotten"


def test_a_reset_also_forgets_what_the_model_took_with_its_features() -> None:
    on = Stage([replace(A, known_bytes=7, known_shed=True)])
    on.do(ResetRequested("a", "c"))
    assert Remember("a", "full", 0) in on.all
    assert live(on) == "full"


def test_other_load_settings_bring_the_features_back_and_other_news_of_the_catalog_do_not() -> None:
    on = shed()
    on.do(ModelsChanged((ModelCost("a", 6, load_key="full", ttl_s=9, features=A.features, without=BARE), ModelCost("b", 1))))
    assert on.slot("a").shed == A.features and on.state("a") is SlotState.READY
    on.do(ModelsChanged((ModelCost("a", 5, load_key="other", features=("kv_bits",), without=BARE), ModelCost("b", 1))))
    assert on.slot("a").shed == () and on.state("a") is SlotState.STOPPING


def test_a_worker_without_features_that_dies_is_a_crash_like_any_other() -> None:
    on = shed()
    die(on)
    assert on.state("a") is SlotState.FAILED, "the third crash in the window"
    assert on.slot("a").shed == A.features
