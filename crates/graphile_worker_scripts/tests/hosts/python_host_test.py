"""The host for Python, spoken to as a worker would: `python3 -m unittest`."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import unittest

SCRIPT = os.path.join(os.path.dirname(__file__), "..", "..", "src", "host", "python.py")


class Host:
    """A host with these files as its tasks."""

    def __init__(self, files):
        self.folder = tempfile.mkdtemp(prefix="graphile-worker-python-host-")
        ours, theirs = socket.socketpair()
        with open(SCRIPT, encoding="utf-8") as script:
            command = [sys.executable, "-c", script.read()]
        environment = {**os.environ, "GRAPHILE_WORKER_HOST_FD": str(theirs.fileno())}
        self.process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        ours.settimeout(30)
        self.socket = ours
        self.lines = ours.makefile("r", encoding="utf-8")
        self.heard = []
        self.send({"type": "hello", "protocol": 1, "tasks_dir": self.folder, "log_level": "debug", "database_url": ""})
        self.hello = self.receive(type="hello")
        for name, text in files.items():
            loaded = self.load(name, text)
            assert loaded["type"] == "loaded", loaded

    def send(self, *frames):
        self.socket.sendall("".join(json.dumps(frame) + "\n" for frame in frames).encode())

    def receive(self, **fits):
        """The first frame that fits, taken out of those that came."""
        while True:
            for frame in self.heard:
                if all(frame.get(name) == value for name, value in fits.items()):
                    self.heard.remove(frame)
                    return frame
            line = self.lines.readline()
            assert line, "the host closed the socket"
            self.heard.append(json.loads(line))

    def load(self, task, text, generation=1):
        path = os.path.join(self.folder, task + ".py")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        self.send({"type": "load", "task": task, "path": path, "generation": generation})
        return self.receive(task=task, generation=generation)

    def run(self, run_id, task, payload=None, generation=1):
        self.send(*run(run_id, task, payload, generation))

    def close(self):
        self.process.kill()
        self.process.wait()
        self.lines.close()
        self.socket.close()
        shutil.rmtree(self.folder)


def run(run_id, task, payload=None, generation=1):
    """The two lines of a run."""
    time = "2030-01-02T03:04:05.678Z"
    job = {"id": "1", "job_queue_id": None, "run_at": time, "created_at": time}
    job.update(updated_at="2030-01-02T03:04:05Z", locked_at=None)
    return {"type": "run", "id": run_id, "task": task, "generation": generation, "payload": payload}, job


class PythonHost(unittest.TestCase):
    def host(self, **files):
        host = Host(files)
        self.addCleanup(host.close)
        return host

    def test_it_reports_its_language_and_version(self):
        host = self.host()
        self.assertEqual((host.hello["protocol"], host.hello["language"]), (1, "python"))
        self.assertEqual(host.hello["version"], "%d.%d.%d" % sys.version_info[:3])

    def test_plain_and_async_functions_run_with_and_without_helpers(self):
        host = self.host(
            plain="def task(payload): pass",
            asynchronous="async def task(payload, helpers): pass",
            returns_a_coroutine="async def inner(): pass\ndef task(payload, helpers): return inner()",
        )
        for run_id, task in enumerate(["plain", "asynchronous", "returns_a_coroutine"], 1):
            host.run(run_id, task)
            self.assertEqual(host.receive(type="done")["ids"], [run_id])

    def test_plain_functions_run_at_the_same_time(self):
        host = self.host(
            t="import threading\nmeet = threading.Barrier(3)\ndef task(payload, helpers): meet.wait(timeout=10)"
        )
        host.send(*run(1, "t"), *run(2, "t"), *run(3, "t"))
        done = []
        while len(done) < 3:
            done += host.receive(type="done")["ids"]
        self.assertEqual(sorted(done), [1, 2, 3])

    def test_a_frame_may_arrive_in_pieces_even_with_a_character_split(self):
        host = self.host(t="def task(payload, helpers): helpers.logger.info(payload)")
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in run(1, "t", "zażółć 🦀")]
        for byte in "".join(lines).encode():
            host.socket.sendall(bytes([byte]))
        self.assertEqual(host.receive(type="log")["message"], "zażółć 🦀")

    def test_a_stack_does_not_contain_the_host(self):
        host = self.host(t="async def task(payload, helpers):\n    raise KeyError('gone')")
        host.run(1, "t")
        error = host.receive(type="failed")["error"]
        self.assertEqual(error["message"], "'gone'")
        self.assertIn("t.py\", line 2, in task", error["stack"])
        self.assertNotIn('"<string>"', error["stack"])

    def test_output_is_logged_with_its_job(self):
        host = self.host(
            a="import asyncio\nasync def task(payload, helpers):\n  for n in range(3):\n    print(payload, n, end='')\n    await asyncio.sleep(0)\n    print('.')",
        )
        host.send(*run(1, "a", "x"), *run(2, "a", "y"))
        said = sorted((frame["run"], frame["message"]) for frame in (host.receive(type="log") for _ in range(6)))
        self.assertEqual(said, [(i, "%s %d." % (name, n)) for i, name in ((1, "x"), (2, "y")) for n in range(3)])

    def test_the_newest_two_versions_of_a_task_can_run_and_no_others(self):
        host = self.host(t="def task(payload, helpers): print(1)")
        for generation in (2, 3):
            host.load("t", "def task(payload, helpers): print(%d)" % generation, generation)
        host.run(1, "t", generation=2)
        self.assertEqual(host.receive(type="log")["message"], "2")
        host.run(2, "t", generation=3)
        self.assertEqual(host.receive(type="log")["message"], "3")
        host.run(3, "t", generation=1)
        host.receive(type="failed", id=3)

    def test_a_file_that_does_not_load_is_reported_and_the_old_version_stays(self):
        host = self.host(t="def task(payload, helpers): print('old')")
        self.assertIn("(t.py, line 1)", host.load("t", "def task(", 2)["error"]["message"])
        self.assertIn("has no `task`", host.load("u", "x = 1")["error"]["message"])
        self.assertIn("is of type int", host.load("v", "task = 1")["error"]["message"])
        self.assertIn("sys.exit(3)", host.load("w", "import sys\nsys.exit(3)")["error"]["message"])
        host.run(1, "t")
        self.assertEqual(host.receive(type="log")["message"], "old")

    def test_an_abort_reaches_threads_and_coroutines(self):
        host = self.host(
            plain="def task(payload, helpers):\n  print('began')\n  helpers.abort_event.wait()",
            asynchronous="async def task(payload, helpers):\n  print('began')\n  await helpers.abort_event.wait()",
        )
        for run_id, task in ((1, "plain"), (2, "asynchronous")):
            host.run(run_id, task)
            host.receive(type="log", message="began")
            host.send({"type": "abort", "id": run_id, "reason": "enough"})
            self.assertEqual(host.receive(type="done")["ids"], [run_id])

    def test_a_job_that_is_aborted_before_it_started_does_not_start(self):
        host = self.host(t="def task(payload, helpers): print('began')")
        host.send(*run(1, "t"), {"type": "abort", "id": 1, "reason": "late"})
        self.assertIn("before it started", host.receive(type="failed", id=1)["error"]["message"])

    def test_the_worker_adds_jobs_for_a_task_and_may_reject_them(self):
        host = self.host(
            t="from datetime import datetime, timezone\ndef task(payload, helpers):\n  helpers.add_job('x', run_at=datetime(2030, 1, 1, tzinfo=timezone.utc))",
            bad="def task(payload, helpers): helpers.add_job('x', jobkey='k')",
            told="def task(payload, helpers):\n  try: helpers.add_job('x')\n  except RuntimeError as error: raise ValueError(error.code) from None",
        )
        host.run(1, "t")
        call = host.receive(type="call")
        spec = {"run_at": "2030-01-01T00:00:00+00:00"}
        self.assertEqual((call["method"], call["run"]), ("add_job", 1))
        self.assertEqual(call["params"], {"identifier": "x", "payload": {}, "spec": spec})
        host.send({"type": "result", "id": call["id"], "error": {"message": "no room"}})
        self.assertEqual(host.receive(type="failed")["error"]["message"], "no room")
        host.run(3, "told")
        call = host.receive(type="call")
        host.send({"type": "result", "id": call["id"], "error": {"message": "too long", "code": "GWBID"}})
        self.assertEqual(host.receive(type="failed")["error"]["message"], "GWBID")
        host.run(2, "bad")
        self.assertIn("a job has no jobkey", host.receive(type="failed")["error"]["message"])

    def test_times_are_times_and_ids_numbers(self):
        host = self.host(t="def task(payload, helpers):\n  job = helpers.job\n  print(job.id + 1, job.run_at.isoformat(), job['updated_at'].isoformat(), job.locked_at)")
        host.run(1, "t")
        said = host.receive(type="log")["message"]
        self.assertEqual(said, "2 2030-01-02T03:04:05.678000+00:00 2030-01-02T03:04:05+00:00 None")

    def test_a_query_goes_through_the_drivers_of_the_project(self):
        # Stand-ins: how the host calls a driver is checked here, that the drivers do it is their own business.
        host = self.host(
            t="def task(payload, helpers): print(helpers.query('select %s', [1]))",
            a="async def task(payload, helpers): print(await helpers.query('select $1', [2]))",
            fails="def task(payload, helpers): helpers.with_connection(lambda connection: 1 / 0)",
        )
        write(host.folder, "psycopg.py", PSYCOPG)
        write(host.folder, "asyncpg.py", ASYNCPG)
        host.run(1, "t")
        self.assertEqual(host.receive(type="log")["message"], "[('connection 1', 'select %s', [1])]")
        host.run(2, "t")
        self.assertEqual(host.receive(type="log")["message"], "[('connection 1', 'select %s', [1])]")
        host.run(3, "fails")
        host.receive(type="failed", id=3)
        host.run(4, "t")
        self.assertEqual(host.receive(type="log")["message"], "[('connection 2', 'select %s', [1])]")
        host.run(5, "a")
        self.assertEqual(host.receive(type="log")["message"], "[{'sql': 'select $1', 'value': 2}]")

    def test_a_driver_that_is_installed_and_does_not_load_is_reported(self):
        host = self.host(
            plain="def task(payload, helpers): helpers.query('select 1')",
            asynchronous="async def task(payload, helpers): await helpers.query('select 1')",
        )
        write(host.folder, "psycopg.py", "raise ImportError('no pq wrapper')")
        write(host.folder, "asyncpg.py", "import no_such_module")
        for run_id, task, problem in ((1, "plain", "no pq wrapper"), (2, "asynchronous", "no_such_module")):
            host.run(run_id, task)
            self.assertIn(problem, host.receive(type="failed", id=run_id)["error"]["message"])

    def test_a_value_that_json_lacks_fails_only_its_own_job(self):
        host = self.host(
            adds="def task(payload, helpers): helpers.add_job('x', {'n': float('nan')})",
            logs="def task(payload, helpers): helpers.logger.info('odd', {'n': float('inf')})",
        )
        host.run(1, "adds")
        self.assertIn("not JSON compliant", host.receive(type="failed", id=1)["error"]["message"])
        host.run(2, "logs")
        self.assertEqual(host.receive(type="log", message="odd")["meta"], "{'n': inf}")

    def test_a_ping_is_answered_while_threads_work(self):
        host = self.host(t="import time\ndef task(payload, helpers): time.sleep(0.2)")
        host.run(1, "t")
        host.send({"type": "ping", "id": 9})
        pong = host.receive(type="pong", id=9)
        self.assertTrue(0 <= pong["busy"] <= 1)
        host.receive(type="done")

    def test_a_payload_that_python_cannot_parse_fails_only_its_own_job(self):
        host = self.host(t="def task(payload, helpers): print('ran')")
        too_long = ["1" * 5_000] if hasattr(sys, "get_int_max_str_digits") else []
        for payload in ["[" * 100_000 + "]" * 100_000, *too_long]:
            begin, job = (json.dumps(line) for line in run(1, "t", 0))
            lines = [begin.replace('"payload": 0', '"payload": ' + payload), job]
            host.socket.sendall("".join(line + "\n" for line in lines).encode())
            self.assertIn("cannot read the payload", host.receive(type="failed", id=1)["error"]["message"])
        host.run(2, "t")
        self.assertEqual(host.receive(type="log", run=2)["message"], "ran")

    def test_an_error_that_cannot_be_read_fails_its_job(self):
        error = "class Odd(Exception):\n  def __str__(self): return self.args[5]\n"
        host = self.host(
            plain=error + "def task(payload, helpers): raise Odd()",
            asynchronous=error + "async def task(payload, helpers): raise Odd()",
        )
        for run_id, task in ((1, "plain"), (2, "asynchronous")):
            host.run(run_id, task)
            self.assertIn("type Odd", host.receive(type="failed", id=run_id)["error"]["message"])

    def test_a_number_that_json_lacks_is_logged_as_text_and_rejected_in_a_payload(self):
        host = self.host(
            logs="def task(payload, helpers): helpers.logger.info('rate', {'rate': float('nan')})",
            adds="def task(payload, helpers): helpers.add_job('x', {'rate': float('inf')})",
        )
        host.run(1, "logs")
        self.assertEqual(host.receive(type="log")["meta"], "{'rate': nan}")
        host.run(2, "adds")
        self.assertIn("not JSON compliant", host.receive(type="failed", id=2)["error"]["message"])

    def test_a_task_may_have_the_name_of_one_of_pythons_modules(self):
        host = self.host(
            helping="NAME = 'beside'\ndef task(payload): pass",
            email="def task(payload, helpers): pass",
            mail="import email.message, helping\ndef task(payload, helpers): print(helping.NAME)",
        )
        host.run(1, "mail")
        self.assertEqual(host.receive(type="log")["message"], "beside")

    def test_an_unfinished_line_of_output_belongs_to_the_job_that_printed_it(self):
        host = self.host(
            half="def task(payload, helpers): print('half', end='')",
            fails="async def task(payload, helpers):\n  print('almost', end='')\n  raise ValueError()",
            whole="def task(payload, helpers): print('whole')",
        )
        for run_id, task, printed in ((1, "half", "half"), (2, "fails", "almost"), (3, "whole", "whole")):
            host.run(run_id, task)
            self.assertEqual(host.receive(type="log", run=run_id)["message"], printed)

    def test_output_takes_bytes_and_has_a_descriptor(self):
        host = self.host(
            t="import faulthandler, subprocess, sys\nfaulthandler.enable()\ndef task(payload, helpers):\n  sys.stdout.buffer.write(b'bytes\\n')\n  subprocess.run(['true'], stdout=sys.stdout, check=True)"
        )
        host.run(1, "t")
        self.assertEqual(host.receive(type="log")["message"], "bytes")
        self.assertEqual(host.receive(type="done")["ids"], [1])

    def test_a_process_that_a_task_has_forked_does_not_write_to_the_socket(self):
        host = self.host(
            t="import os, sys\ndef task(payload, helpers):\n  print('before')\n  child = os.fork()\n  if child == 0:\n    print('of the child')\n    helpers.logger.info('of the child')\n    sys.exit(3)\n  print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))",
        )
        host.run(1, "t")
        host.receive(type="done")
        self.assertEqual([frame["message"] for frame in host.heard], ["before", "3"])

    def test_tasks_are_found_by_their_modules_when_another_is_loaded_again(self):
        host = self.host(
            t="import pickle\nclass Thing: pass\ndef task(payload, helpers): pickle.loads(pickle.dumps(Thing()))",
            other="def task(payload, helpers): pass",
        )
        host.load("other", "def task(payload, helpers): pass", 2)
        host.run(1, "t")
        self.assertEqual(host.receive(type="done")["ids"], [1])

    def test_a_file_that_was_deleted_and_created_again_is_loaded_with_its_imports(self):
        host = self.host(helping="NAME = 'old'\ndef task(payload): pass")
        text = "import helping\ndef task(payload, helpers): print(helping.NAME)"
        host.load("t", text)
        host.send({"type": "unload", "task": "t"})
        write(host.folder, "helping.py", "NAME = 'new'")
        host.load("t", text)
        host.run(1, "t")
        self.assertEqual(host.receive(type="log")["message"], "new")

    def test_the_host_ignores_signals_and_ends_when_the_socket_is_closed(self):
        host = self.host(t="def task(payload, helpers): pass")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            host.process.send_signal(number)
        host.run(1, "t")
        host.receive(type="done")
        host.socket.shutdown(socket.SHUT_WR)
        self.assertEqual(host.process.wait(timeout=30), 0)


def write(folder, name, text):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        file.write(text)


PSYCOPG = """
import os, types
rows = types.SimpleNamespace(dict_row=None)
pq = types.SimpleNamespace(TransactionStatus=types.SimpleNamespace(IDLE=0))
made = 0
class Connection:
    closed = False
    info = types.SimpleNamespace(transaction_status=0)
    def __init__(self): self.pipe = os.pipe()
    def fileno(self): return self.pipe[0]
    def cursor(self, row_factory): return Cursor(self)
    def close(self): self.closed = True
class Cursor:
    description = True
    def __init__(self, connection): self.connection = connection
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def execute(self, sql, values): self.asked = [(self.connection.name, sql, values)]
    def fetchall(self): return self.asked
def connect(url, autocommit, prepare_threshold):
    global made
    made += 1
    connection = Connection()
    connection.name = 'connection %d' % made
    return connection
"""

ASYNCPG = """
class Pool:
    def acquire(self): return self
    async def __aenter__(self): return self
    async def __aexit__(self, *_): pass
    async def fetch(self, sql, *values): return [{'sql': sql, 'value': values[0]}]
async def create_pool(url, min_size, max_size, statement_cache_size): return Pool()
"""

if __name__ == "__main__":
    unittest.main()
