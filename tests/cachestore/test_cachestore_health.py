import errno

import pytest

from cachestore.health import Health, Trouble, Vigil, of_write_error

OK = Health()
FULL = Health(Trouble.FULL, "no space left")
MISSING = Health(Trouble.MISSING, "no such directory")


def looked_at(health: Health) -> Vigil:
    vigil = Vigil(recheck_s=30)
    assert vigil.look_due(0)
    vigil.looked(health)
    return vigil


@pytest.mark.parametrize(
    ("number", "trouble"),
    [
        (errno.ENOSPC, Trouble.FULL),
        (errno.EDQUOT, Trouble.FULL),
        (errno.EROFS, Trouble.READ_ONLY),
        (errno.EACCES, Trouble.READ_ONLY),
        (errno.ENOENT, Trouble.MISSING),
        (errno.EIO, Trouble.IO_ERROR),
    ],
)
def test_a_failed_write_tells_what_is_wrong(number: int, trouble: Trouble) -> None:
    health = of_write_error(OSError(number, "said the kernel"))
    assert health is not None
    assert health.trouble is trouble


def test_running_out_of_descriptors_says_nothing_about_the_disk() -> None:
    assert of_write_error(OSError(errno.EMFILE, "too many open files")) is None


def test_a_full_store_is_read_but_not_written() -> None:
    assert FULL.can_read
    assert not FULL.can_write
    assert not MISSING.can_read


def test_it_looks_once_per_pause() -> None:
    vigil = Vigil(recheck_s=30)
    assert [vigil.look_due(now) for now in (0, 1, 29, 30, 31)] == [True, False, False, True, False]


def test_a_full_disk_is_tried_by_one_write_per_pause_and_announced_once() -> None:
    vigil = looked_at(OK)
    assert vigil.wrote(FULL, 10)
    assert not vigil.may_write()
    assert not vigil.look_due(39)
    assert vigil.look_due(40)
    assert not vigil.looked(OK)  # the directory looks fine, as full ones do
    assert vigil.health == FULL
    assert [vigil.may_write(), vigil.may_write()] == [True, False]
    assert not vigil.wrote(FULL, 41)
    assert vigil.look_due(71)
    vigil.looked(OK)
    assert vigil.may_write()
    assert vigil.wrote(OK, 71)
    assert vigil.may_write()


def test_a_directory_that_is_back_is_used_at_once() -> None:
    vigil = looked_at(OK)
    vigil.wrote(MISSING, 5)
    assert vigil.look_due(35)
    assert vigil.looked(OK)
    assert vigil.health == OK
