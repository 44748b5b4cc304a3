// The host for JavaScript, driven as a worker drives it: `node --test`.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import fs from "node:fs";
import nodeModule from "node:module";
import os from "node:os";
import path from "node:path";
import { createInterface } from "node:readline";
import { test } from "node:test";

const SCRIPT = fs.readFileSync(new URL("../../src/host/node.cjs", import.meta.url), "utf8");

/** A host with these files as its tasks. */
async function start(t, files, environment = {}) {
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), "graphile-worker-node-host-"));
  const child = spawn(process.execPath, ["--input-type=commonjs", "--eval", SCRIPT], {
    env: { ...process.env, GRAPHILE_WORKER_HOST_FD: "3", NODE_TEST_CONTEXT: undefined, ...environment },
    stdio: ["ignore", "pipe", "pipe", "pipe"],
  });
  t.after(() => {
    child.kill("SIGKILL");
    fs.rmSync(folder, { recursive: true });
  });
  const socket = child.stdio[3];
  const received = [];
  let changed = () => {};
  createInterface({ input: socket }).on("line", (line) => {
    received.push(JSON.parse(line));
    changed();
  });
  const host = {
    folder,
    child,
    socket,
    exited: new Promise((resolve) => child.on("exit", (code, signal) => resolve({ code, signal }))),
    send: (...frames) => socket.write(frames.map((frame) => JSON.stringify(frame) + "\n").join("")),
    /** The first frame that fits, removed from those that have arrived. */
    async receive(fits) {
      for (;;) {
        const place = received.findIndex((frame) => Object.entries(fits).every(([key, value]) => frame[key] === value));
        if (place !== -1) return received.splice(place, 1)[0];
        await new Promise((resolve) => (changed = resolve));
      }
    },
    async load(task, file, text, generation = 1) {
      const full = path.join(folder, file);
      fs.writeFileSync(full, text);
      host.send({ type: "load", task, path: full, generation });
      for (;;) {
        const place = received.findIndex((frame) => /loaded$/.test(frame.type) && frame.task === task);
        if (place !== -1) return received.splice(place, 1)[0];
        await new Promise((resolve) => (changed = resolve));
      }
    },
    run: (id, task, payload, generation = 1) => host.send(...run(id, task, payload, generation)),
  };
  host.send({ type: "hello", protocol: 1, tasks_dir: folder, log_level: "debug", database_url: "" });
  const hello = await host.receive({ type: "hello" });
  assert.deepEqual([hello.protocol, hello.language, hello.version], [1, "javascript", process.version]);
  for (const [file, text] of Object.entries(files)) {
    const loaded = await host.load(path.parse(file).name, file, text);
    assert.equal(loaded.type, "loaded", JSON.stringify(loaded));
  }
  return host;
}

/** The two lines of a run. */
function run(id, task, payload, generation = 1) {
  const time = "2030-01-02T03:04:05.678901Z";
  const times = { run_at: time, created_at: time, updated_at: time, locked_at: null };
  const job = { id: "1", task_identifier: task, attempts: 1, max_attempts: 25, job_queue_id: null, ...times };
  return [{ type: "run", id, task, generation, payload }, job];
}

test("jobs that end at the same moment are reported in one frame", async (t) => {
  const host = await start(t, { "nothing.js": "module.exports = async () => {};" });
  host.send(...[1, 2, 3].flatMap((id) => run(id, "nothing", {})));
  assert.deepEqual((await host.receive({ type: "done" })).ids, [1, 2, 3]);
});

test("a frame may arrive in pieces, even with a character split", async (t) => {
  const host = await start(t, { "echo.js": "module.exports = ({ text }, { logger }) => logger.info(text);" });
  const bytes = Buffer.from(run(1, "echo", { text: "zażółć 🦀" }).map((line) => JSON.stringify(line) + "\n").join(""));
  for (const byte of bytes) {
    host.socket.write(Buffer.from([byte]));
    await new Promise(setImmediate);
  }
  assert.equal((await host.receive({ type: "log" })).message, "zażółć 🦀");
  assert.deepEqual((await host.receive({ type: "done" })).ids, [1]);
});

test("a task that is not loaded, or was unloaded, fails its job", async (t) => {
  const host = await start(t, { "t.js": "module.exports = () => {};" });
  host.run(1, "other", {});
  assert.match((await host.receive({ type: "failed", id: 1 })).error.message, /"other" is not loaded/);
  host.send({ type: "unload", task: "t" });
  host.run(2, "t", {});
  await host.receive({ type: "failed", id: 2 });
});

test("the newest two versions of a task can run, and no others", async (t) => {
  const host = await start(t, { "t.js": "module.exports = (_, { logger }) => logger.info('1');" });
  for (const generation of [2, 3]) {
    await host.load("t", "t.js", `module.exports = (_, { logger }) => logger.info('${generation}');`, generation);
  }
  host.run(1, "t", {}, 2);
  assert.equal((await host.receive({ type: "log" })).message, "2");
  host.run(2, "t", {}, 3);
  assert.equal((await host.receive({ type: "log" })).message, "3");
  host.run(3, "t", {}, 1);
  await host.receive({ type: "failed", id: 3 });
});

test("a changed module is loaded again, and keeps its old version if it does not load", async (t) => {
  const host = await start(t, { "t.mjs": "export default (_, { logger }) => logger.info('old');" });
  const broken = await host.load("t", "t.mjs", "export default (", 2);
  assert.equal(broken.type, "not_loaded");
  host.run(1, "t", {}, 1);
  assert.equal((await host.receive({ type: "log" })).message, "old");
  await host.load("t", "t.mjs", "export default (_, { logger }) => logger.info('new');", 3);
  host.run(2, "t", {}, 3);
  assert.equal((await host.receive({ type: "log" })).message, "new");
});

/** For tests of what takes a Node that asks how modules are found; before, only the task itself is loaded anew. */
const takesHooks = { skip: nodeModule.registerHooks ? false : `Node ${process.version} has no module.registerHooks` };
const takesNoHooks = { skip: nodeModule.registerHooks ? "it is for a Node without module.registerHooks" : false };

/** Writes files beside the tasks. */
function write(host, files) {
  for (const [file, text] of Object.entries(files)) {
    const full = path.join(host.folder, file);
    fs.mkdirSync(path.dirname(full), { recursive: true });
    fs.writeFileSync(full, text);
  }
}

/** What a version of a task logs. */
async function logged(host, task, generation) {
  host.run(generation, task, {}, generation);
  return (await host.receive({ type: "log", run: generation })).message;
}

test("imports of a changed module are loaded again with it, each once", takesHooks, async (t) => {
  const host = await start(t, {});
  const task = `import { a } from "./lib/a.mjs";
    import { b } from "./lib/b.js";
    export default async (_, { logger }) => {
      const { c } = await import("./lib/c.mjs");
      logger.info([a, b, c, globalThis.evaluated].join());
    };`;
  const libraries = (version) => ({
    "package.json": '{ "type": "module" }',
    "lib/a.mjs": `import { c } from "./c.mjs"; export const a = "a${version}" + c;`,
    "lib/b.js": `import { c } from "./c.mjs"; export const b = "b${version}" + c;`,
    "lib/c.mjs": `globalThis.evaluated = (globalThis.evaluated ?? 0) + 1; export const c = "c${version}";`,
  });
  write(host, libraries(1));
  await host.load("t", "t.mjs", task);
  assert.equal(await logged(host, "t", 1), "a1c1,b1c1,c1,1");
  write(host, libraries(2));
  await host.load("t", "t.mjs", task, 2);
  assert.equal(await logged(host, "t", 2), "a2c2,b2c2,c2,2");
  assert.equal(await logged(host, "t", 1), "a1c1,b1c1,c1,2", "what was loaded before has what it had");
});

test("imports in TypeScript are loaded again, too", takesHooks, async (t) => {
  if (!process.features.typescript) return t.skip(`Node ${process.version} does not strip types`);
  const host = await start(t, {});
  const task = `import { name } from "./lib/name.ts";
    import { title } from "./lib/title.mts";
    export default (_: unknown, { logger }: { logger: Console }): void => logger.info(title + name);`;
  for (const version of [1, 2]) {
    write(host, {
      "lib/name.ts": `export const name: string = "name${version}";`,
      "lib/title.mts": `export const title: string = "title${version} ";`,
    });
    await host.load("t", "t.ts", task, version);
    assert.equal(await logged(host, "t", version), `title${version} name${version}`);
  }
});

test("imported packages, CommonJS and JSON are not loaded again", takesHooks, async (t) => {
  const host = await start(t, {});
  const task = `import fs from "node:fs";
    import data from "./lib/data.json" with { type: "json" };
    import common from "./lib/common.cjs";
    import plain from "./lib/plain.js";
    import ofPackage from "a-package";
    const all = [data, common, plain, ofPackage, fs];
    globalThis.first ??= all;
    export default (_, { logger }) => logger.info(all.map((value, place) => value === globalThis.first[place]).join());`;
  write(host, {
    "lib/data.json": "{}",
    "lib/common.cjs": "module.exports = { required: require('./plain.js') };",
    "lib/plain.js": "module.exports = {};",
    "node_modules/a-package/package.json": '{ "type": "module", "exports": "./index.js" }',
    "node_modules/a-package/index.js": 'import inner from "./inner.js"; export default inner;',
    "node_modules/a-package/inner.js": "export default {};",
  });
  for (const version of [1, 2]) {
    assert.equal((await host.load("t", "t.mjs", task, version)).type, "loaded");
    assert.equal(await logged(host, "t", version), "true,true,true,true,true");
  }
});

test("each task that is loaded after a change gets the current version of its imports", takesHooks, async (t) => {
  const host = await start(t, {});
  const task = 'import { value } from "./lib/value.mjs"; export default (_, { logger }) => logger.info(value);';
  const change = (text) => write(host, { "lib/value.mjs": text });
  change('export const value = "old";');
  for (const name of ["a", "b"]) await host.load(name, `${name}.mjs`, task);
  change('export const value = "new";');
  await host.load("a", "a.mjs", task, 2);
  assert.equal(await logged(host, "a", 2), "new");
  assert.equal(await logged(host, "b", 1), "old");
  change("export const value = ");
  assert.equal((await host.load("b", "b.mjs", task, 2)).type, "not_loaded");
  change('export const value = "newest";');
  await host.load("b", "b.mjs", task, 3);
  assert.equal(await logged(host, "b", 3), "newest");
  await host.load("c", "c.mjs", task);
  assert.equal(await logged(host, "c", 1), "newest", "in a task that has just come");
});

test("without hooks, imports are not loaded again", takesNoHooks, async (t) => {
  const host = await start(t, {});
  const task = (version) => `import { value } from "./lib/value.mjs"; export default (_, { logger }) => logger.info("${version} " + value);`;
  for (const version of [1, 2]) {
    write(host, { "lib/value.mjs": `export const value = ${version};` });
    await host.load("t", "t.mjs", task(version), version);
    assert.equal(await logged(host, "t", version), `${version} 1`);
  }
});

test("default exports in the form of compilers are tasks", async (t) => {
  const host = await start(t, {
    "a.cjs": "Object.defineProperty(exports, '__esModule', { value: true }); exports.default = () => {};",
    "b.cjs": "exports.default = { __esModule: true, default: () => {} };",
  });
  host.send(...run(1, "a", {}), ...run(2, "b", {}));
  assert.deepEqual((await host.receive({ type: "done" })).ids, [1, 2]);
});

test("a file that exports no function is rejected with the type of its export", async (t) => {
  const host = await start(t, {});
  assert.match((await host.load("a", "a.js", "module.exports = { a: 1 };")).error.message, /type object, expected a function/);
  assert.match((await host.load("b", "b.js", "throw new Error('not today');")).error.message, /not today/);
});

test("a syntax error is reported with its line", async (t) => {
  const host = await start(t, {});
  for (const [file, begin] of [["common.js", "module.exports ="], ["module.mjs", "export default"]]) {
    const refused = await host.load(path.parse(file).name, file, `\n\n${begin} async () => { call(1 };\n`);
    assert.match(refused.error.message, /missing \)/);
    const [place, line, mark] = refused.error.stack.split("\n");
    assert.ok(place.endsWith(`${file}:3`), place);
    assert.deepEqual([line.includes("call(1 };"), mark.includes("^")], [true, true]);
  }
});

test("an abort reaches the signal and the promise, even if the task reads them later", async (t) => {
  const host = await start(t, {
    "t.js": `module.exports = async (_, helpers) => {
      const early = helpers.abortSignal;
      await new Promise((resolve) => early.addEventListener("abort", resolve));
      const late = await helpers.abortPromise.catch((error) => error.name);
      throw new Error([early.aborted, late].join());
    };`,
  });
  host.run(7, "t", {});
  host.send({ type: "ping", id: 1 });
  await host.receive({ type: "pong" });
  host.send({ type: "abort", id: 7, reason: "enough" });
  assert.equal((await host.receive({ type: "failed", id: 7 })).error.message, "true,AbortError");
});

test("a host reports how busy it is", async (t) => {
  // It spins for so much time of the processor: on a crowded machine, little of it may be in a second.
  const host = await start(t, {
    "spin.js": `module.exports = ({ ms }) => {
      const used = () => process.cpuUsage().user / 1000;
      const end = used() + ms;
      while (used() < end);
    };`,
  });
  const busy = async (id) => {
    host.send({ type: "ping", id });
    return (await host.receive({ type: "pong", id })).busy;
  };
  // Beside other work, a host may wait for a core for most of the time: then it is asked again.
  let [idle, spinning] = [1, 0];
  for (let id = 1; idle >= spinning && id < 20; id++) {
    await busy(id * 10);
    host.run(id, "spin", { ms: 500 });
    await host.receive({ type: "done" });
    spinning = await busy(id * 10 + 1);
    await new Promise((resolve) => setTimeout(resolve, 200));
    idle = await busy(id * 10 + 2);
  }
  assert.ok(0 <= idle && idle < spinning && spinning <= 1, `${idle} while idle, ${spinning} at work`);
});

test("a job that is aborted before it started does not start", async (t) => {
  const host = await start(t, { "t.js": "module.exports = (_, { logger }) => logger.info('began');" });
  host.send(...run(1, "t", {}), { type: "abort", id: 1, reason: "late" });
  assert.match((await host.receive({ type: "failed", id: 1 })).error.message, /before it started/);
});

test("times are dates, and helpers survive being copied", async (t) => {
  const host = await start(t, {
    "t.js": `module.exports = (_, helpers) => {
      const { job } = { ...helpers };
      throw new Error([job.run_at instanceof Date, job.run_at.toISOString(), job.locked_at].join());
    };`,
  });
  host.run(1, "t", {});
  assert.equal((await host.receive({ type: "failed" })).error.message, "true,2030-01-02T03:04:05.678Z,");
});

test("helpers are created on first use and behave like a plain object", async (t) => {
  const host = await start(t, {
    "t.js": `module.exports = (_, helpers) => {
      const same = helpers.logger === helpers.logger && helpers.job === { ...helpers }.job;
      helpers.mine = 1;
      helpers.query = 2;
      console.log(helpers);
      throw new Error([same, Object.keys(helpers).sort(), "addJob" in helpers, "toJSON" in helpers, helpers.query, helpers.none].join());
    };`,
  });
  host.run(1, "t", {});
  const names = "abortPromise,abortSignal,addJob,addJobs,debug,getQueueName,job,logger,mine,query,withPgClient";
  assert.match((await host.receive({ type: "log" })).message, /job: \{[^]*withPgClient: \[AsyncFunction[^]*mine: 1/);
  assert.equal((await host.receive({ type: "failed" })).error.message, `true,${names},true,false,2,`);
});

test("an error that the worker returns is thrown", async (t) => {
  const host = await start(t, { "t.js": "module.exports = (_, { addJob }) => addJob('x', undefined, { jobKey: '', priority: 0 });" });
  host.run(1, "t", {});
  const call = await host.receive({ type: "call" });
  assert.deepEqual([call.method, call.run, call.params], ["add_job", 1, { identifier: "x", payload: {}, spec: {} }]);
  host.send({ type: "result", id: call.id, error: { message: "no room" } });
  assert.equal((await host.receive({ type: "failed" })).error.message, "no room");
});

test("addJobs has one key mode, and warns about the mode of a single job", async (t) => {
  const host = await start(t, {
    "t.js": "module.exports = (_, { addJobs }) => addJobs([{ identifier: 'x', jobKey: 'k', jobKeyMode: 'unsafe_dedupe' }], true);",
  });
  host.run(1, "t", {});
  assert.match((await host.receive({ type: "log", level: "warning", run: 1 })).message, /use addJob/);
  const { params } = await host.receive({ type: "call", method: "add_jobs" });
  assert.deepEqual(params.jobs, [{ identifier: "x", payload: {}, spec: { job_key: "k", job_key_mode: "preserve_run_at" } }]);
});

test("a spec accepts numbers as text and text as numbers, as the database does", async (t) => {
  const host = await start(t, {
    "t.js": "module.exports = (_, { addJob }) => addJob('x', 1, { jobKey: 7, queueName: 8n, priority: '-3', maxAttempts: '4' });",
  });
  host.run(1, "t", {});
  const spec = { queue_name: "8", max_attempts: 4, job_key: "7", priority: -3 };
  assert.deepEqual((await host.receive({ type: "call" })).params, { identifier: "x", payload: 1, spec });
});

test("an error of the database has its code", async (t) => {
  const host = await start(t, { "t.js": "module.exports = (_, { addJob }) => addJob('x').catch(({ message, code }) => { throw new Error([message, code].join()); });" });
  host.run(1, "t", {});
  const call = await host.receive({ type: "call" });
  host.send({ type: "result", id: call.id, error: { message: "too long", code: "GWBID" } });
  assert.equal((await host.receive({ type: "failed" })).error.message, "too long,GWBID");
});

test("an added job has is_available", async (t) => {
  const host = await start(t, {
    "t.js": `module.exports = async (_, { addJob, job }) => {
      const added = await addJob("x");
      throw new Error([added.is_available, added.run_at instanceof Date, job.is_available].join());
    };`,
  });
  const [frame, job] = run(1, "t", {});
  host.send(frame, { ...job, locked_at: "2030-01-02T03:04:05Z" });
  const call = await host.receive({ type: "call" });
  host.send({ type: "result", id: call.id, value: { ...job, payload: {} } });
  assert.equal((await host.receive({ type: "failed" })).error.message, "true,true,false");
});

/** What counts as `pg` for one test: its clients do what the tasks say. */
const PG = `exports.Pool = class {
  on() {}
  async end() {}
  async connect() { return { release: () => {}, query: async (text) => ({ rows: [{ text }] }) }; }
};`;

function install(folder, name, text) {
  const place = path.join(folder, "node_modules", ...name.split("/"));
  fs.mkdirSync(place, { recursive: true });
  fs.writeFileSync(path.join(place, "index.js"), text);
}

test("pg may be a package of the project, or a dependency of its graphile-worker", async (t) => {
  const task = "module.exports = async (_, { query }) => { throw new Error((await query('select 1')).rows[0].text); };";
  const hidden = await start(t, { "t.js": task });
  install(hidden.folder, "graphile-worker", "");
  install(hidden.folder, "graphile-worker/node_modules/pg", PG);
  hidden.run(1, "t", {});
  assert.equal((await hidden.receive({ type: "failed" })).error.message, "select 1");
  const without = await start(t, { "t.js": task });
  without.run(1, "t", {});
  assert.match((await without.receive({ type: "failed" })).error.message, /run `npm install pg`/);
});

test("withRetries retries after transient errors", async (t) => {
  const host = await start(t, {
    "t.js": `module.exports = async ({ code, times }, { withPgClient }) => {
      let calls = 0;
      const result = await withPgClient.withRetries(async () => {
        if (++calls <= times) throw Object.assign(new Error("not now"), { code });
        return "done";
      }).catch((error) => error.message);
      throw new Error([result, calls].join());
    };`,
  });
  install(host.folder, "pg", PG);
  for (const [id, payload, outcome] of [
    [1, { code: "40001", times: 2 }, "done,3"],
    [2, { code: "40P01", times: 1 }, "done,2"],
    [3, { code: "23505", times: 1 }, "not now,1"],
    [4, { times: 1 }, "not now,1"],
  ]) {
    host.run(id, "t", payload);
    assert.equal((await host.receive({ type: "failed", id })).error.message, outcome);
  }
});

test("helpers.debug logs, and names its replacement", async (t) => {
  const host = await start(t, { "t.js": "module.exports = (_, { debug }) => debug('details', 1);" });
  host.run(1, "t", {});
  assert.match((await host.receive({ type: "log", level: "error" })).message, /logger\.debug/);
  const { message, meta, run } = await host.receive({ type: "log", level: "debug" });
  assert.deepEqual([message, meta, run], ["details", { parameters: [1] }, 1]);
});

test("a message that is logged after the end of a job still names the job", async (t) => {
  const host = await start(t, {
    "t.js": `module.exports = (_, { logger }) => {
      setImmediate(() => setImmediate(() => {
        logger.scope({ step: 2 }).info("late");
        console.log("later");
      }));
    };`,
  });
  host.run(1, "t", {});
  await host.receive({ type: "done" });
  assert.deepEqual((await host.receive({ type: "log", message: "late" })).scope, { task_identifier: "t", job_id: "1", step: 2 });
  assert.deepEqual((await host.receive({ type: "log", message: "later" })).scope, { task_identifier: "t", job_id: "1" });
});

test("an error is reported with the errors that it contains", async (t) => {
  const host = await start(t, {
    "t.js": "module.exports = () => { throw new AggregateError([new Error('one'), 'two'], '', { cause: new Error('zero') }); };",
  });
  host.run(1, "t", {});
  const { message, stack } = (await host.receive({ type: "failed" })).error;
  assert.equal(message, "AggregateError");
  assert.match(stack, /caused by: zero\n[^]*caused by: one\n[^]*caused by: two$/);
  assert.doesNotMatch(stack, /node:/);
});

test("an error that is its own cause is reported with a bounded length", async (t) => {
  const host = await start(t, {
    "t.js": "module.exports = () => { const error = new Error('round'); error.cause = error; throw error; };",
  });
  host.run(1, "t", {});
  const { message, stack } = (await host.receive({ type: "failed" })).error;
  assert.deepEqual([message, stack.match(/caused by: round/g).length], ["round", 8]);
});

test("an error that throws when it is read fails only its own job", async (t) => {
  const host = await start(t, {
    "t.js": "module.exports = async () => { throw { get message() { throw new Error('no'); } }; };",
    "fine.js": "module.exports = () => {};",
  });
  host.run(1, "t", {});
  assert.match((await host.receive({ type: "failed", id: 1 })).error.message, /cannot be read/);
  host.run(2, "fine", {});
  assert.deepEqual((await host.receive({ type: "done" })).ids, [2]);
});

test("frames that are sent before the process exits arrive", async (t) => {
  const host = await start(t, {
    "fine.js": "module.exports = () => {};",
    "exits.js": "module.exports = () => { console.log('bye'); process.exit(4); };",
  });
  host.send(...["fine", "exits"].flatMap((task, place) => run(place + 1, task, {})));
  assert.deepEqual((await host.receive({ type: "done" })).ids, [1]);
  assert.equal((await host.receive({ type: "log" })).message, "bye");
  assert.deepEqual(await host.exited, { code: 4, signal: null });
});

test("an uncaught error is reported before the process ends", async (t) => {
  const host = await start(t, { "t.js": "module.exports = () => new Promise(() => setTimeout(() => { throw new Error('lost'); }));" });
  host.run(1, "t", {});
  assert.match((await host.receive({ type: "fatal" })).error.message, /^uncaught error: lost/);
  assert.equal((await host.exited).code, 1);
});

test("the host ignores signals, and ends when the socket is closed", async (t) => {
  const host = await start(t, { "t.js": "module.exports = () => {};" });
  for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"]) host.child.kill(signal);
  host.run(1, "t", {});
  await host.receive({ type: "done" });
  host.socket.end();
  assert.deepEqual(await host.exited, { code: 0, signal: null });
});

test("a task can start a fork and a worker thread", async (t) => {
  const host = await start(t, {
    "t.js": `const { fork } = require("node:child_process");
      const { Worker } = require("node:worker_threads");
      module.exports = async (_, { logger }) => {
        const child = fork(__dirname + "/child.cjs");
        logger.info(await new Promise((resolve) => child.on("message", resolve)));
        const worker = new Worker(__dirname + "/child.cjs");
        logger.info(await new Promise((resolve) => worker.on("message", resolve)));
      };`,
  });
  fs.writeFileSync(
    path.join(host.folder, "child.cjs"),
    `const say = process.send ? (m) => process.send(m) : (m) => require("node:worker_threads").parentPort.postMessage(m);
     say(String(process.env.GRAPHILE_WORKER_HOST_FD) + (process.send ? " child" : " thread"));`,
  );
  host.run(1, "t", {});
  assert.equal((await host.receive({ type: "log" })).message, "undefined child");
  assert.equal((await host.receive({ type: "log" })).message, "undefined thread");
});

test("child processes of a task do not inherit the options that start a host", async (t) => {
  const host = await start(t, {
    "t.js": `const { execFileSync } = require("node:child_process");
      module.exports = (_, { logger }) => logger.info(execFileSync(process.execPath, [...process.execArgv, __dirname + "/child.cjs"]).toString());`,
  });
  fs.writeFileSync(path.join(host.folder, "child.cjs"), "process.stdout.write('child');");
  host.run(1, "t", {});
  assert.equal((await host.receive({ type: "log" })).message, "child");
});

test("names of the host are not visible to tasks, which may use them themselves", async (t) => {
  const host = await start(t, {
    "looks.js": "module.exports = (_, { logger }) => logger.info([typeof flush, typeof fs, typeof socket, typeof query].join());",
    "module.mjs": "export default (_, { logger }) => logger.info([typeof require, typeof module, typeof __dirname].join());",
  });
  host.run(1, "looks", {});
  assert.equal((await host.receive({ type: "log" })).message, "undefined,undefined,undefined,undefined");
  host.run(2, "module", {});
  assert.equal((await host.receive({ type: "log" })).message, "undefined,undefined,undefined");
  await host.load(
    "takes",
    "takes.js",
    `globalThis.pool = { size: 3 };
     for (const name of ["run", "log", "call", "finish", "flush", "tasks"]) globalThis[name] = () => {};
     module.exports = (_, { logger }) => logger.info(String(pool.size));`,
  );
  host.run(3, "takes", {});
  assert.equal((await host.receive({ type: "log" })).message, "3");
});

test("the host is not a module, whatever NODE_OPTIONS contains", async (t) => {
  const host = await start(t, { "t.js": "module.exports = () => {};" }, { NODE_OPTIONS: "--input-type=module" });
  host.run(1, "t", {});
  assert.deepEqual((await host.receive({ type: "done" })).ids, [1]);
});

test("a task may replace the timers", async (t) => {
  const host = await start(t, { "t.js": "module.exports = () => { globalThis.setImmediate = globalThis.setTimeout = () => {}; };" });
  host.run(1, "t", {});
  assert.deepEqual((await host.receive({ type: "done" })).ids, [1]);
});

test("an unfinished line of output belongs to the job that printed it", async (t) => {
  const host = await start(t, {
    "t.js": `module.exports = async (text) => {
      process.stdout.write(text);
      await new Promise((resolve) => setTimeout(resolve));
      if (text === "b") throw new Error("no");
    };`,
  });
  host.send(...run(1, "t", "a"), ...run(2, "t", "b"), ...run(3, "t", "c\n"));
  for (const [id, text] of [[1, "a"], [2, "b"], [3, "c"]]) {
    assert.equal((await host.receive({ type: "log", run: id })).message, text);
  }
});
