"""The host for Python: runs task files for the worker that started this process.

It speaks the protocol of docs/host-protocol.md over a socket, and leaves stdin, stdout and stderr to the tasks.
`async def` tasks run in the event loop, plain ones in threads. Both get the same helpers. An `async def` has to await
those that call the worker or the database.
"""

import asyncio
import contextvars
import importlib
import inspect
import io
import json
import os
import queue
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
from concurrent.futures import Future
from datetime import datetime, timezone

PROTOCOL = 1
LEVELS = ["error", "warning", "info", "debug"]

# The run that the current code belongs to.
current = contextvars.ContextVar("graphile_worker_run", default=None)


# The beginning of a `run` frame, which has the id of the run even if the payload cannot be parsed.
RUN = re.compile(rb'\{"type": ?"run", ?"id": ?(\d+)')

# The prefix of the names of modules that task files become.
MODULE = "graphile_worker_task_"

# Files that were loaded before. The generations of a file that was deleted and created again start from the beginning.
LOADED = set()


def to_json(value):
    # NaN and infinity are not JSON. They are an error in the task, not a frame that the worker cannot parse.
    return json.dumps(value, separators=(",", ":"), default=str, allow_nan=False)


class Host:
    """The connection to the worker, and what has arrived over it."""

    def __init__(self, connection):
        self.connection = connection
        self.loop = None
        self.transport = None
        self.hello = {"log_level": "info", "tasks_dir": os.getcwd(), "concurrency": 1}
        self.tasks = {}
        self.runs = {}
        self.calls = {}
        self.last_call = 0
        self.queue_names = {}
        self.threads = Threads()
        self.loads = asyncio.Queue()
        self.databases = None
        self.background = set()
        self.measured = measure()
        self.outgoing = []
        self.done_ids = []
        self.flush_is_due = False
        self.lock = threading.Lock()
        self.unfinished = []
        # A run whose second line, the job, has not arrived yet.
        self.half_run = None
        self.ended = asyncio.Event()
        self.printed = [Printed(self, "info", 1), Printed(self, "warning", 2)]

    # Frames. Those of one turn of the event loop are collected and sent in one write. Threads send frames as well, so
    # the lock protects everything that they use here.

    def send(self, frame):
        text = to_json(frame)
        with self.lock:
            self.outgoing.append(text)
        self.flush_soon()

    def send_done(self, run_id):
        with self.lock:
            self.done_ids.append(run_id)
        self.flush_soon()

    def flush_soon(self):
        if not self.flush_is_due:
            self.flush_is_due = True
            if threading.get_ident() == self.thread:
                self.loop.call_soon(self.flush)
            else:
                self.loop.call_soon_threadsafe(self.flush)

    def flush(self):
        self.flush_is_due = False
        data = self.take_outgoing()
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def take_outgoing(self):
        # `done` comes last, after everything that its runs have sent.
        with self.lock:
            if self.done_ids:
                self.outgoing.append('{"type":"done","ids":%s}' % self.done_ids)
                self.done_ids = []
            outgoing, self.outgoing = self.outgoing, []
        return ("\n".join(outgoing) + "\n").encode() if outgoing else b""

    def flush_at_once(self):
        """Sends the rest synchronously, just before the process ends."""
        # Part of a frame may still be buffered: another frame must not end up in the middle of it.
        if self.transport is not None and self.transport.get_write_buffer_size() == 0:
            try:
                self.connection.setblocking(True)
                self.connection.settimeout(1)
                self.connection.sendall(self.take_outgoing())
            except OSError:
                pass

    # asyncio's protocol.

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        end = data.rfind(b"\n")
        if end == -1:
            self.unfinished.append(data)
            return
        self.unfinished.append(data[:end])
        frames = self.frames_in(b"".join(self.unfinished).split(b"\n"))
        self.unfinished = [data[end + 1 :]]
        # A job that waited behind a long one may be aborted already: then it does not start.
        unwanted = {frame["id"] for frame in frames if frame["type"] == "abort"}
        for frame in frames:
            self.handle(frame, unwanted)

    def frames_in(self, lines):
        """Does not parse the second line of a run: few tasks read their job, and that line is the longer one."""
        frames = []
        for line in lines:
            if self.half_run:
                self.half_run["job_text"] = line
                frames.append(self.half_run)
                self.half_run = None
                continue
            frame = frame_in(line)
            if frame["type"] == "run":
                self.half_run = frame
            else:
                frames.append(frame)
        return frames

    def eof_received(self):
        self.ended.set()

    def connection_lost(self, _error):
        self.ended.set()

    def pause_writing(self):
        pass

    def resume_writing(self):
        pass

    def handle(self, frame, unwanted):
        kind = frame["type"]
        if kind == "run":
            if frame["id"] in unwanted:
                self.fail(frame["id"], RuntimeError("aborted before it started"))
            elif "unreadable" in frame:
                self.fail(frame["id"], RuntimeError("this Python cannot read the payload: %s" % frame["unreadable"]))
            else:
                self.begin(frame)
        elif kind == "abort":
            run = self.runs.get(frame["id"])
            if run is not None:
                run.abort()
        elif kind == "result":
            self.answer(frame)
        elif kind == "ping":
            self.send({"type": "pong", "id": frame["id"], "busy": self.busy()})
        elif kind == "load":
            # One after the other: if a file ends this process, the worker knows which one it was.
            self.loads.put_nowait(frame)
        elif kind == "unload":
            self.tasks.pop(frame["task"], None)
        elif kind == "database":
            self.databases.use(frame["url"])
        elif kind == "hello":
            self.hello = frame
            self.databases = Databases(self)
            project = os.path.dirname(os.path.abspath(frame["tasks_dir"]))
            sys.path.insert(0, project)
            # After Python's own modules: `import email` must not find the task `email`.
            sys.path.insert(first_of_packages(sys.path), os.path.abspath(frame["tasks_dir"]))
            version = "%d.%d.%d" % sys.version_info[:3]
            self.send(
                {"type": "hello", "protocol": PROTOCOL, "language": "python", "version": version, "pid": os.getpid()}
            )
        # Other frames belong to a later version of the protocol.

    def busy(self):
        """The share of time since the last call in which this host was working, without time in which it waited for a core."""
        before, self.measured = self.measured, measure()
        passed, worked, waited = (now - then for now, then in zip(self.measured, before))
        return min(1.0, worked / max(passed - waited, worked, 1e-6))

    # Loading task files.

    async def load_files(self):
        while True:
            frame = await self.loads.get()
            # In a thread: a file that loads slowly must not block running jobs.
            await self.loop.run_in_executor(None, self.load, frame)

    def load(self, frame):
        task, generation = frame["task"], frame["generation"]
        try:
            function = load_task(frame["path"], generation, self.hello["tasks_dir"])
            generations = self.tasks.setdefault(task, {})
            # Keeps the last version, which jobs that are being sent may still name.
            for old in sorted(generations)[:-1]:
                del generations[old]
            generations[generation] = Task(function)
            self.send({"type": "loaded", "task": task, "generation": generation})
        except SystemExit as error:
            problem = {"message": "the file called sys.exit(%r) while it was loading" % (error.code,)}
            self.send({"type": "not_loaded", "task": task, "generation": generation, "error": problem})
        except BaseException as error:
            self.send({"type": "not_loaded", "task": task, "generation": generation, "error": describe(error)})

    # Running jobs.

    def begin(self, frame):
        task = self.tasks.get(frame["task"], {}).get(frame["generation"])
        if task is None:
            error = RuntimeError("the task %r is not loaded in this host" % frame["task"])
            self.fail(frame["id"], error)
        elif task.is_async:
            run = self.runs[frame["id"]] = AsyncRun(self, frame)
            self.keep(run.run(task))
        else:
            run = self.runs[frame["id"]] = ThreadRun(self, frame)
            self.threads.run(run, task)

    def keep(self, coroutine):
        # The event loop holds its tasks only weakly.
        background = self.loop.create_task(coroutine)
        self.background.add(background)
        background.add_done_callback(self.background.discard)

    def finish(self, run_id):
        self.end_lines()
        self.runs.pop(run_id, None)
        self.send_done(run_id)

    def fail(self, run_id, error):
        self.end_lines()
        self.runs.pop(run_id, None)
        self.send({"type": "failed", "id": run_id, "error": describe(error)})

    def leave(self, exit_of):
        """Ends the process because a task called `sys.exit`. Reports first which run it was."""
        code = exit_of.code
        run = current.get()
        error = {"message": "the task called sys.exit(%s)" % ("" if code is None else repr(code))}
        self.send({"type": "fatal", "run": None if run is None else run.id, "error": error})
        self.flush_at_once()
        if code is not None and not isinstance(code, int):
            sys.__stderr__.write("%s\n" % code)
            sys.__stderr__.flush()
            code = 1
        os._exit(code or 0)

    def finish_batch(self, run_id, payload, results):
        """Ends a run whose task received a list and returned a result for each item."""
        if len(results) != len(payload):
            text = "the task returned %d results for %d items: the job counts as done" % (len(results), len(payload))
            self.log("warning", text)
            self.finish(run_id)
            return
        items = [
            [place, describe(result)] for place, result in enumerate(results) if isinstance(result, BaseException)
        ]
        if not items:
            self.finish(run_id)
            return
        self.end_lines()
        self.runs.pop(run_id, None)
        self.send({"type": "failed", "id": run_id, "items": items})

    def end_lines(self):
        """Logs an unfinished line of output, so that it does not run into the next job's."""
        for printed in self.printed:
            printed.end_line()

    # Calls to the worker.

    def call(self, run_id, method, params):
        future = Future()
        with self.lock:
            self.last_call += 1
            call_id = self.last_call
            self.calls[call_id] = future
        self.send({"type": "call", "id": call_id, "run": run_id, "method": method, "params": params})
        return future

    def answer(self, frame):
        future = self.calls.pop(frame["id"], None)
        if future is None:
            return
        if frame.get("error"):
            error = RuntimeError(frame["error"]["message"])
            error.code = frame["error"].get("code")
            future.set_exception(error)
        else:
            future.set_result(frame.get("value"))

    def log(self, level, message, meta=None, scope=None):
        if LEVELS.index(level) > LEVELS.index(self.hello["log_level"]):
            return
        frame = {"type": "log", "level": level, "message": str(message)}
        run = current.get()
        if run is not None:
            frame["run"] = run.id
        if meta is not None:
            frame["meta"] = meta
        if scope:
            frame["scope"] = scope
        try:
            self.send(frame)
        except (TypeError, ValueError, RecursionError):
            # Circular objects, keys that are not strings, and NaN are not JSON.
            frame.pop("scope", None)
            self.send({**frame, "meta": repr(meta)})


def measure():
    """Seconds: elapsed, worked, and waited for a free core (if the system has `/proc`)."""
    try:
        with open("/proc/self/schedstat") as file:
            waited = int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        waited = 0.0
    return time.monotonic(), time.process_time(), waited


def frame_in(line):
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        # PostgreSQL stores numbers and depths that Python cannot parse. That fails this job only.
        begin = RUN.match(line)
        if begin is None:
            raise
        return {"type": "run", "id": int(begin[1]), "unreadable": error}


def first_of_packages(path):
    """The position in a search path after Python's own modules."""
    names = ("site-packages", "dist-packages")
    return next((place for place, folder in enumerate(path) if os.path.basename(folder) in names), len(path))


class Task:
    """A function of a task file."""

    def __init__(self, function):
        self.function = function
        self.is_async = is_async(function)
        self.wants_helpers = accepts_two(function)

    def __call__(self, payload, helpers):
        return self.function(payload, helpers) if self.wants_helpers else self.function(payload)


def is_async(function):
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))


def accepts_two(function):
    try:
        inspect.signature(function).bind(None, None)
        return True
    except TypeError:
        return False
    except ValueError:
        return True


def load_task(path, generation, tasks_dir):
    """Loads the function `task` of a file, without any cache for the file and for other files in the folder."""
    folder = os.path.abspath(tasks_dir) + os.sep
    if path in LOADED:
        for name, module in list(sys.modules.items()):
            # Modules of other tasks stay: libraries look them up by name.
            is_task = name.startswith(MODULE)
            if not is_task and str(getattr(module, "__file__", None) or "").startswith(folder):
                del sys.modules[name]
        importlib.invalidate_caches()
    LOADED.add(path)
    module = types.ModuleType("%s%d_%s" % (MODULE, generation, os.path.basename(path)[:-3]))
    module.__file__ = path
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    # Some libraries look up the module of a class by its name.
    sys.modules[module.__name__] = module
    exec(code, module.__dict__)
    function = getattr(module, "task", None)
    if function is None:
        raise TypeError("%s has no `task`, expected a function: def task(payload, helpers)" % path)
    if not callable(function):
        raise TypeError("`task` in %s is of type %s, expected a function" % (path, type(function).__name__))
    return function


class Run:
    """A running job, which is also the helpers of its task."""

    def __init__(self, host, frame):
        self.id = frame["id"]
        self._host = host
        self._payload = frame["payload"]
        self._job_text = frame["job_text"]
        self._job = None
        self.logger = Logger(host)

    @property
    def job(self):
        if self._job is None:
            self._job = revive(json.loads(self._job_text))
            self._job["payload"] = self._payload
        return self._job

    def rate_limited(self, seconds, limit=None):
        """An error to raise: the job runs again after this delay without using an attempt. Until then, its limit is closed."""
        return RateLimited(seconds, limit)

    def _queue_id(self, given):
        return self.job["job_queue_id"] if given is None else given

    def _add_job(self, identifier, payload, spec):
        params = {"identifier": identifier, "payload": {} if payload is None else payload, "spec": spec_of(spec)}
        return self._host.call(self.id, "add_job", params)

    def _add_jobs(self, jobs, preserve_run_at):
        params = []
        for job in jobs:
            spec = dict(job)
            identifier, payload = spec.pop("identifier"), spec.pop("payload", None)
            if spec.get("job_key_mode"):
                raise ValueError("add_jobs cannot have a job_key_mode of its own for each job: use add_job for that")
            spec["job_key_mode"] = "preserve_run_at" if preserve_run_at else None
            params.append(
                {"identifier": identifier, "payload": {} if payload is None else payload, "spec": spec_of(spec)}
            )
        return self._host.call(self.id, "add_jobs", {"jobs": params})

    def _ask_queue_name(self, queue_id):
        return self._host.call(self.id, "get_queue_name", {"id": queue_id})


SPEC = {"queue_name", "run_at", "max_attempts", "job_key", "job_key_mode", "priority", "flags"}


def spec_of(spec):
    unknown = sorted(set(spec) - SPEC)
    if unknown:
        raise TypeError("a job has no %s, expected %s" % (", ".join(unknown), ", ".join(sorted(SPEC))))
    given = {name: value for name, value in spec.items() if value is not None}
    if isinstance(given.get("run_at"), datetime):
        # A time without a zone is in the time zone of this machine.
        given["run_at"] = given["run_at"].astimezone(timezone.utc).isoformat()
    return given


class Job(dict):
    """A job: its columns as keys and as attributes."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError("a job has no %s" % name) from None


def revive(raw):
    job = Job(raw)
    job["id"] = int(raw["id"])
    for name in ("run_at", "created_at", "updated_at", "locked_at"):
        if raw[name] is not None:
            job[name] = time_of(raw[name])
    return job


def time_of(text):
    # Before Python 3.11, `fromisoformat` accepts only six digits and no `Z`.
    whole, _, fraction = text.rstrip("Z").partition(".")
    return datetime.fromisoformat("%s.%s+00:00" % (whole, (fraction + "000000")[:6]))


class ThreadRun(Run):
    """The helpers of a `def`: they block until they are done."""

    def __init__(self, host, frame):
        super().__init__(host, frame)
        self.abort_event = threading.Event()

    def abort(self):
        self.abort_event.set()

    def add_job(self, identifier, payload=None, **spec):
        return revive(self._add_job(identifier, payload, spec).result())

    def add_jobs(self, jobs, preserve_run_at=False):
        return [revive(job) for job in self._add_jobs(jobs, preserve_run_at).result()]

    def get_queue_name(self, queue_id=None):
        queue_id, names = self._queue_id(queue_id), self._host.queue_names
        if queue_id is not None and queue_id not in names:
            names[queue_id] = self._ask_queue_name(queue_id).result()
        return names.get(queue_id)

    def query(self, sql, values=None):
        return self._host.databases.query(sql, values)

    def with_connection(self, callback):
        return self._host.databases.with_connection(callback)

    def run(self, task):
        host, payload = self._host, self._payload
        current.set(self)
        try:
            result = task(payload, self)
            if inspect.isawaitable(result):
                result = asyncio.run_coroutine_threadsafe(awaited(result), host.loop).result()
            if isinstance(result, list) and isinstance(payload, list):
                host.finish_batch(self.id, payload, result)
            else:
                host.finish(self.id)
        except SystemExit as error:
            host.leave(error)
        except BaseException as error:
            host.fail(self.id, error)
        finally:
            current.set(None)


async def awaited(value):
    return await value


class AsyncRun(Run):
    """The helpers of an `async def`, which awaits them."""

    def __init__(self, host, frame):
        super().__init__(host, frame)
        self.abort_event = asyncio.Event()

    def abort(self):
        self.abort_event.set()

    async def add_job(self, identifier, payload=None, **spec):
        return revive(await asyncio.wrap_future(self._add_job(identifier, payload, spec)))

    async def add_jobs(self, jobs, preserve_run_at=False):
        return [revive(job) for job in await asyncio.wrap_future(self._add_jobs(jobs, preserve_run_at))]

    async def get_queue_name(self, queue_id=None):
        queue_id, names = self._queue_id(queue_id), self._host.queue_names
        if queue_id is not None and queue_id not in names:
            names[queue_id] = await asyncio.wrap_future(self._ask_queue_name(queue_id))
        return names.get(queue_id)

    async def query(self, sql, values=None):
        return await self._host.databases.query_async(sql, values)

    async def with_connection(self, callback):
        return await self._host.databases.with_connection_async(callback)

    async def run(self, task):
        host, payload = self._host, self._payload
        current.set(self)
        try:
            result = await task(payload, self)
            if isinstance(result, list) and isinstance(payload, list):
                results = await asyncio.gather(*map(settled, result))
                host.finish_batch(self.id, payload, results)
            else:
                host.finish(self.id)
        except SystemExit as error:
            host.leave(error)
        except BaseException as error:
            host.fail(self.id, error)


async def settled(result):
    try:
        return await result if inspect.isawaitable(result) else result
    except Exception as error:
        return error


def describe(error):
    """An error as a frame carries it: its message, then where it happened."""
    try:
        message = str(error) or type(error).__name__
    except Exception:
        # Reading the error raises another one.
        message = "the task raised an error of type %s that cannot be read" % type(error).__name__
    own = sys._getframe().f_code.co_filename
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == own:
        trace = trace.tb_next
    if trace is None and not isinstance(error, SyntaxError):
        return {"message": message, **break_of(error)}
    lines = traceback.format_exception(type(error), error, trace)
    return {"message": message, "stack": "".join(lines).rstrip(), **break_of(error)}


def break_of(error):
    """The fields of a `RateLimited`, besides its message."""
    if not isinstance(error, RateLimited):
        return {}
    return {"rate_limited_for": error.rate_limited_for, "limit": error.limit}


class RateLimited(Exception):
    """The job has not failed. Its limit, or the named one, is closed for this many seconds."""

    def __init__(self, seconds, limit=None):
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf"):
            raise TypeError("rate_limited: the delay must be a number of seconds and at least 0, got %r" % (seconds,))
        if limit is not None and not isinstance(limit, str):
            raise TypeError("rate_limited: the limit must be a name such as 'group:api', got %r" % (limit,))
        super().__init__("rate limited for %s s" % seconds)
        self.rate_limited_for = float(seconds)
        self.limit = limit


class Threads:
    """Threads for plain functions: as many as the largest number of simultaneous jobs so far."""

    def __init__(self):
        self.queue = queue.SimpleQueue()
        # The number of idle threads, without those for which a job is already in the queue.
        self.idle = 0
        self.lock = threading.Lock()

    def run(self, run, task):
        with self.lock:
            needs_more = self.idle == 0
            if not needs_more:
                self.idle -= 1
        self.queue.put((run, task))
        if needs_more:
            threading.Thread(target=self.work, name="graphile-worker-task", daemon=True).start()

    def work(self):
        while True:
            run, task = self.queue.get()
            run.run(task)
            # A waiting thread must not keep the payload in memory.
            run = task = None
            with self.lock:
                self.idle += 1


class Logger:
    """`helpers.logger`."""

    def __init__(self, host, scope=None):
        self._host = host
        self._scope = scope

    def error(self, message, meta=None):
        self._host.log("error", message, meta, self._scope)

    def warning(self, message, meta=None):
        self._host.log("warning", message, meta, self._scope)

    warn = warning

    def info(self, message, meta=None):
        self._host.log("info", message, meta, self._scope)

    def debug(self, message, meta=None):
        self._host.log("debug", message, meta, self._scope)

    def scope(self, **more):
        return Logger(self._host, {**(self._scope or {}), **more})


# Behind a pooler in transaction mode, the next use of a prepared statement may reach another session.
UNPREPARED_PSYCOPG = {"prepare_threshold": None}
UNPREPARED_ASYNCPG = {"statement_cache_size": 0}


class Databases:
    """Connections of the project's own psycopg or asyncpg. Idle ones are kept for the next query."""

    def __init__(self, host):
        self.host = host
        self.url = host.hello.get("database_url") or ""
        # The maximum number of connections, for each driver.
        self.most = host.hello.get("max_pool_size") or 10
        self.free = []
        self.turn = threading.Semaphore(self.most)
        self.free_async = []
        self.turn_async = asyncio.Semaphore(self.most)
        self.pool = None
        self.pool_lock = asyncio.Lock()

    def use(self, url):
        """Uses this URL for new connections. Idle connections may still work; closed ones are detected."""
        self.url = url
        if self.pool is not None:
            self.pool.set_connect_args(url)

    def missing(self, wanted):
        return RuntimeError(
            "helpers.query needs %s, which this Python (%s) does not have: install it in the project's environment"
            % (wanted, sys.executable)
        )

    # In a `def`: psycopg.

    def with_connection(self, callback):
        psycopg = package("psycopg")
        if psycopg is None:
            raise self.missing("psycopg (or, in an `async def`, asyncpg)")
        with self.turn:
            connection = self.free_connection()
            if connection is None:
                connection = psycopg.connect(self.url, autocommit=True, **UNPREPARED_PSYCOPG)
            try:
                result = callback(connection)
            except BaseException:
                # The task may have left a transaction open.
                connection.close()
                raise
            if self.may_be_used_again(psycopg, connection):
                self.free.append(connection)
            else:
                connection.close()
            return result

    def free_connection(self):
        while True:
            try:
                connection = self.free.pop()
            except IndexError:
                return None
            if is_quiet(connection):
                return connection
            connection.close()

    def may_be_used_again(self, psycopg, connection):
        if connection.closed:
            return False
        is_idle = connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        if not is_idle:
            self.host.log("warning", "the task left a transaction open on a connection of helpers: rolled back")
        return is_idle

    def query(self, sql, values=None):
        def ask(connection):
            with connection.cursor(row_factory=package("psycopg").rows.dict_row) as cursor:
                cursor.execute(sql, values)
                return cursor.fetchall() if cursor.description else []

        return self.with_connection(ask)

    # In an `async def`: asyncpg, else psycopg's own async connections.

    async def with_connection_async(self, callback):
        asyncpg = package("asyncpg")
        if asyncpg is not None:
            pool = await self.asyncpg_pool(asyncpg)
            async with pool.acquire() as connection:
                return await callback(connection)
        psycopg = package("psycopg")
        if psycopg is None:
            raise self.missing("psycopg or asyncpg")
        async with self.turn_async:
            connection = await self.free_async_connection()
            if connection is None:
                connection = await psycopg.AsyncConnection.connect(self.url, autocommit=True, **UNPREPARED_PSYCOPG)
            try:
                result = await callback(connection)
            except BaseException:
                await connection.close()
                raise
            if self.may_be_used_again(psycopg, connection):
                self.free_async.append(connection)
            else:
                await connection.close()
            return result

    async def free_async_connection(self):
        while self.free_async:
            connection = self.free_async.pop()
            if is_quiet(connection):
                return connection
            await connection.close()
        return None

    async def asyncpg_pool(self, asyncpg):
        async with self.pool_lock:
            if self.pool is None:
                self.pool = await asyncpg.create_pool(
                    self.url, min_size=0, max_size=self.most, **UNPREPARED_ASYNCPG
                )
        return self.pool

    async def query_async(self, sql, values=None):
        async def ask(connection):
            if package("asyncpg") is not None:
                return [dict(row) for row in await connection.fetch(sql, *(values or []))]
            async with connection.cursor(row_factory=package("psycopg").rows.dict_row) as cursor:
                await cursor.execute(sql, values)
                return await cursor.fetchall() if cursor.description else []

        return await self.with_connection_async(ask)


def is_quiet(connection):
    """Whether a connection is open, with nothing to read: what a server sends on its own usually announces its end."""
    if connection.closed:
        return False
    unread = select.poll()
    unread.register(connection.fileno(), select.POLLIN)
    return not unread.poll(0)


def package(name):
    """A package of the project; None if it is not installed. Raises if it is installed and does not load."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


class Printed(io.TextIOBase):
    """Standard output or error of the tasks: the worker logs each line with its job."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, host, level, descriptor):
        super().__init__()
        self.host = host
        self.level = level
        self.descriptor = descriptor
        self.buffer = PrintedBytes(self)
        self.begun = contextvars.ContextVar("graphile_worker_printed_%s" % level, default="")

    def write(self, text):
        *lines, rest = (self.begun.get() + str(text)).split("\n")
        self.begun.set(rest)
        for line in lines:
            self.host.log(self.level, line)
        return len(text)

    def end_line(self):
        if self.begun.get():
            self.write("\n")

    def writable(self):
        return True

    def fileno(self):
        """The descriptor for child processes: the worker logs their output without a job."""
        return self.descriptor


class PrintedBytes(io.RawIOBase):
    """The same for bytes."""

    def __init__(self, text):
        super().__init__()
        self.text = text

    def write(self, data):
        self.text.write(bytes(data).decode("utf-8", "replace"))
        return len(data)

    def writable(self):
        return True

    def fileno(self):
        return self.text.fileno()


def be_a_child(host):
    """Called in a process that a task has forked: only the host may write to the socket."""
    host.connection.close()
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    host.log = lambda _level, message, *_: print(message, flush=True)


async def main(descriptor):
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(False)
    os.set_inheritable(descriptor, False)
    host = Host(connection)
    host.loop = asyncio.get_running_loop()
    host.thread = threading.get_ident()
    sys.stdout, sys.stderr = host.printed
    os.register_at_fork(after_in_child=lambda: be_a_child(host))
    host.loop.set_exception_handler(lambda _loop, context: report(host, context))
    # Python itself would only print the error, which the worker logs like any output.
    threading.excepthook = lambda thread: report_thread(host, thread)
    await host.loop.create_connection(lambda: host, sock=connection)
    host.keep(host.load_files())
    await host.ended.wait()


def report(host, context):
    error = context.get("exception")
    described = describe(error) if error is not None else {"message": context["message"]}
    host.log("error", "uncaught error: " + described["message"], described.get("stack"))


def report_thread(host, thread):
    # `sys.exit` is a normal way to end a thread.
    if thread.exc_type is not SystemExit:
        report(host, {"exception": thread.exc_value})


def start():
    descriptor = int(os.environ.pop("GRAPHILE_WORKER_HOST_FD"))
    # Only the worker handles these, and lets jobs finish. Some process managers send them to all processes.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, lambda *_: None)
    sys.argv = ["graphile-worker"]
    # Python would use cached code for a file that was changed within the same second.
    sys.dont_write_bytecode = True
    try:
        asyncio.run(main(descriptor))
    finally:
        # A thread may still run a job, but the worker is gone or has closed the socket.
        os._exit(0)


start()
