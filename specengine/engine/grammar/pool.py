"""Compiling untrusted grammars: few at a time, and first where it can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from queue import SimpleQueue

from specengine.core.errors import QueueFullError, RequestError
from specengine.core.grammar import GrammarSpec
from specengine.core.limits import LimitConfig
from specengine.engine.grammar.compiler import GrammarCompiler, refusal
from specengine.engine.grammar.state import LlguidanceState


class GrammarPool:
    """A grammar that is new is tried in a process of its own, which ends when it takes too long or
    its caller goes away. What has passed there is compiled here, in one of as many threads: it is
    known to end, and llguidance lets other threads run meanwhile."""

    def __init__(self, compiler: GrammarCompiler, limits: LimitConfig) -> None:
        self._compiler = compiler
        self._limits = limits
        self._threads = ThreadPoolExecutor(limits.grammar_workers, "grammar")
        seconds = limits.grammar_timeout
        self._trials = [TrialProcess(compiler, seconds) for _ in range(limits.grammar_workers)]
        self._idle: SimpleQueue[TrialProcess] = SimpleQueue()
        for trial in self._trials:
            self._idle.put(trial)
        self._lock = threading.Lock()
        self._num_open = 0

    def submit(self, spec: GrammarSpec) -> GrammarJob:
        """Begin to compile a grammar. Safe to call from any thread.

        Raises RequestError where no grammar can be served, and QueueFullError where too many wait.
        """
        job = GrammarJob(spec)
        if (compiled := self._compiler.compiled(spec)) is not None:
            job.future.set_result(compiled)
            return job
        self._compiler.check(spec)
        with self._lock:
            if self._num_open >= self._limits.grammar_workers + self._limits.max_queued_grammars:
                raise QueueFullError("too many grammars wait to be compiled; retry later")
            self._num_open += 1
        job.future.add_done_callback(self._count_done)
        self._threads.submit(self._run, job)
        return job

    def close(self) -> None:
        """End every process. Nothing may be started afterwards."""
        for trial in self._trials:
            trial.close()
        self._threads.shutdown(cancel_futures=True)
        for trial in self._trials:
            trial.reap()

    def _count_done(self, _: object) -> None:
        with self._lock:
            self._num_open -= 1

    def _run(self, job: GrammarJob) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            job.future.set_result(self._compile(job))
        except Exception as error:
            job.future.set_exception(error)

    def _compile(self, job: GrammarJob) -> LlguidanceState:
        trial = self._idle.get()
        try:
            with job.killing(trial):
                reason, num_bytes = trial.attempt(job.spec)
        finally:
            self._idle.put(trial)
        if reason is not None:
            raise refusal(job.spec, reason)
        return self._compiler.start(job.spec, num_bytes)


class GrammarJob:
    """A grammar that is being compiled. future: a state at its beginning, or RequestError where it
    does not compile within the limits. It may be cancelled from any thread at any time."""

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.future: Future[LlguidanceState] = Future()
        self._lock = threading.Lock()
        self._trial: TrialProcess | None = None
        self._is_cancelled = False

    @contextmanager
    def killing(self, trial: TrialProcess) -> Iterator[None]:
        """Within it, `cancel` kills this trial."""
        with self._lock:
            if self._is_cancelled:
                raise RequestError("the client has gone")
            self._trial = trial
        try:
            yield
        finally:
            with self._lock:
                self._trial = None

    def cancel(self) -> None:
        """Kill its trial."""
        self.future.cancel()  # where it has not begun
        with self._lock:
            self._is_cancelled = True
            if self._trial is not None:
                self._trial.kill()


class TrialProcess:
    """trial.py, started when it is needed, and again when it has ended."""

    def __init__(self, compiler: GrammarCompiler, seconds: float) -> None:
        self._compiler = compiler
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False

    def attempt(self, spec: GrammarSpec) -> tuple[str | None, int]:
        """Why the grammar does not pass, None where it does, and the bytes that it holds."""
        is_running = self._process is not None and self._process.poll() is None
        process = self._process if self._process is not None and is_running else self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not is_running:
                process.stdin.write(json.dumps(self._compiler.vocabulary()) + "\n")
            process.stdin.write(json.dumps(asdict(spec)) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            reason, num_bytes = json.loads(answer)
            return reason, num_bytes
        self.reap()
        return f"it takes more than {self._seconds:g} s, or too much memory; simplify it", 0

    def kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Whatever runs ends, and nothing starts any more."""
        self._is_closed = True
        self.kill()

    def reap(self) -> None:
        """End the process, if there is one, and close its pipes."""
        if self._process is not None:
            with suppress(BrokenPipeError), self._process as process:
                process.kill()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        if self._is_closed:
            raise RequestError("the server is shutting down")
        self.reap()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "specengine.engine.grammar.trial", str(self._seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # a Ctrl-C at the terminal is for the server
        )
        return self._process
