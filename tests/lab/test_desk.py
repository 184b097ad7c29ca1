"""Jobs over HTTP: how many run at once, the queue, and cancellation."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from clearhead.errors import DataError
from clearhead.lab.limits import Limits
from clearhead.lab.server import Lab
from clearhead.lab.work import Ticket, Work
from tests.lab.running import WAITING, asked, running, until, work_request

SMALL = Limits(works=2, waiting=1, patience=0.6, seconds=30.0)


class Blocking:
    """A job that ends when the test allows it, and counts how many ran at once."""

    def __init__(self) -> None:
        self.let, self.now, self.most, self.lock = threading.Event(), 0, 0, threading.Lock()
        self.work = Work("held", self.run)

    def run(self, params: Mapping[str, Any], ticket: Ticket) -> Any:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            while not self.let.wait(0.005):
                ticket.step(0.5, "held")
            return params
        finally:
            with self.lock:
                self.now -= 1


def test_progress_comes_before_the_result() -> None:
    def count(params: Mapping[str, Any], ticket: Ticket) -> Any:
        for done in range(4):
            ticket.step(done / 4, f"part {done}")
            time.sleep(0.07)
        return "done"

    with running(works=[Work("count", count)]) as lab:
        lines = asked(lab, "count").lines
    assert lines[-1] == {"result": "done"}
    assert lines[0] == {"progress": 0.0, "text": "part 0"}
    assert [line["progress"] for line in lines[:-1]] == [0.0, 0.25, 0.5, 0.75]


def test_progress_is_sent_at_a_limited_rate() -> None:
    def many(params: Mapping[str, Any], ticket: Ticket) -> Any:
        for done in range(20_000):
            ticket.step(done / 20_000)
        return None

    with running(works=[Work("many", many)]) as lab:
        assert len(asked(lab, "many").lines) < 200


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (DataError("look: text must be shorter;\n got 3. Cut it."), "look: text must be shorter; got 3. Cut it."),
        (RuntimeError("secret /etc/path"), "fail: failed inside the lab (RuntimeError). The lab's terminal shows"),
        (MemoryError(), "fail: there is not enough memory. Request less."),
        (RecursionError("deep"), "fail: failed inside the lab (RecursionError)."),
    ],
)
def test_failure_is_one_line_and_the_lab_continues(
    failure: Exception, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(params: Mapping[str, Any], ticket: Ticket) -> Any:
        raise failure

    with running(works=[Work("fail", fail)]) as lab:
        for _ in range(5):
            answer = asked(lab, "fail")
            assert answer.status == 200
            assert answer.last["error"].startswith(says)
            assert "secret" not in answer.last["error"]
        until(lambda: lab.desk.num_jobs == 0)
    # What the page is not told is told in the terminal.
    assert ("Traceback" in capsys.readouterr().err) == isinstance(failure, RuntimeError)


@pytest.mark.covering(0)
@pytest.mark.parametrize("result", [float("nan"), float("inf"), object(), {"a": {1, 2}}])
def test_result_that_is_not_json_is_a_failure(result: object) -> None:
    with running(works=[Work("odd", lambda params, ticket: result)]) as lab:
        assert "failed inside the lab" in asked(lab, "odd").last["error"]
        assert asked(lab, "models").last["result"]["models"]


def test_jobs_beyond_the_limit_wait_or_are_busy() -> None:
    blocking = Blocking()
    limits = Limits(works=2, waiting=1, patience=60.0)
    with running(limits=limits, works=[blocking.work]) as lab, ThreadPoolExecutor(8) as pool:
        first = [pool.submit(asked, lab, "held", {"n": n}) for n in range(2)]
        until(lambda: blocking.now == 2)
        third = pool.submit(asked, lab, "held", {"n": 2})
        until(lambda: lab.desk.num_jobs == 3)
        fourth = asked(lab, "held", {"n": 3})
        assert fourth.status == 503
        assert fourth.last["error"] == "busy: held cannot start, as 2 jobs are running. Try again soon."
        blocking.let.set()
        assert [one.result().last["result"]["n"] for one in (*first, third)] == [0, 1, 2]
        assert blocking.most == 2
        until(lambda: lab.desk.num_jobs == 0)
        assert asked(lab, "held", {"n": 4}).last["result"]["n"] == 4


@pytest.mark.slow
def test_job_that_waits_too_long_is_busy_and_leaves_the_queue() -> None:
    blocking = Blocking()
    with running(limits=SMALL, works=[blocking.work]) as lab, ThreadPoolExecutor(4) as pool:
        both = [pool.submit(asked, lab, "held") for _ in range(2)]
        until(lambda: blocking.now == 2)
        began = time.monotonic()
        assert asked(lab, "held").last["error"].startswith("busy: held")
        assert 0.5 < time.monotonic() - began < 5
        until(lambda: lab.desk.num_jobs == 2, 2)
        blocking.let.set()
        for one in both:
            one.result()


def test_disconnect_cancels_the_job() -> None:
    blocking = Blocking()
    with running(limits=SMALL, works=[blocking.work, WAITING]) as lab:
        for _ in range(3):
            with work_request(lab, "wait") as one, work_request(lab, "wait") as two:
                assert b"progress" in one.recv(4096) + one.recv(4096)
                assert two.recv(4096)
                assert lab.desk.num_jobs == 2
            until(lambda: lab.desk.num_jobs == 0, 2)
        blocking.let.set()
        assert asked(lab, "held", {"n": 1}).last == {"result": {"n": 1}}


def test_disconnect_of_a_waiting_client_frees_its_place() -> None:
    blocking = Blocking()
    with running(limits=Limits(works=1, waiting=1), works=[blocking.work]) as lab, ThreadPoolExecutor(2) as pool:
        first = pool.submit(asked, lab, "held")
        until(lambda: blocking.now == 1)
        with work_request(lab, "held"):
            until(lambda: lab.desk.num_jobs == 2)
            assert asked(lab, "held").status == 503
        until(lambda: lab.desk.num_jobs == 1, 2)
        blocking.let.set()
        assert first.result().status == 200


def test_job_ends_at_its_time_limit() -> None:
    limits = Limits(seconds=0.3)
    with running(limits=limits, works=[WAITING, Work("own", WAITING.run, seconds=0.1)]) as lab:
        for name, seconds in (("wait", "0.3"), ("own", "0.1")):
            answer = asked(lab, name)
            says = f"{name}: exceeded its limit of {seconds} seconds. Request less."
            assert answer.last == {"error": says}
            until(lambda: lab.desk.num_jobs == 0, 2)


@pytest.mark.slow
def test_job_without_steps_is_answered_at_its_time_limit() -> None:
    let = threading.Event()

    def deaf(params: Mapping[str, Any], ticket: Ticket) -> Any:
        let.wait(20)

    with running(limits=Limits(seconds=0.1), works=[Work("deaf", deaf)]) as lab:
        began = time.monotonic()
        assert "exceeded its limit of 0.1 seconds" in asked(lab, "deaf").last["error"]
        assert time.monotonic() - began < 5
        # Its place stays taken until it really ends.
        assert lab.desk.num_jobs == 1
        let.set()
        until(lambda: lab.desk.num_jobs == 0)


def test_stopping_the_lab_cancels_its_jobs() -> None:
    answers: list[Any] = []
    with running(works=[WAITING]) as lab, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(asked, lab, "wait")
        until(lambda: lab.desk.num_jobs == 1)
        lab.stop()
        answers.append(waiting.result(10).last)
    assert answers == [{"error": "wait: was cancelled."}]
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("clearhead lab")]


def test_fifty_clients_get_correct_answers_or_busy() -> None:
    def double(params: Mapping[str, Any], ticket: Ticket) -> Any:
        time.sleep(0.02)
        return 2 * params["n"]

    with running(limits=Limits(works=2, waiting=8), works=[Work("double", double)]) as lab:
        with ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(lambda n: (n, asked(lab, "double", {"n": n})), range(50)))
        right = [n for n, answer in answers if answer.last == {"result": 2 * n}]
        busy = [n for n, answer in answers if answer.status == 503 and answer.last["error"].startswith("busy: ")]
        assert sorted(right + busy) == list(range(50))
        assert len(right) >= 10
        until(lambda: lab.desk.num_jobs == 0)


def test_two_labs_are_independent() -> None:
    with running() as one, running() as other:
        assert one.port != other.port
        assert isinstance(one, Lab)
        assert asked(one, "models").status == asked(other, "models").status == 200
