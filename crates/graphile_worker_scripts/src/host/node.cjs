// The host for JavaScript and TypeScript: runs task files for the worker that started this process.
// It speaks the protocol of docs/host-protocol.md over a socket, and leaves stdin, stdout and stderr to the tasks.
// Node evaluates it as global code: the function around it keeps its names from the tasks.
(() => {
"use strict";

const { AsyncLocalStorage } = require("node:async_hooks");
const { execFile } = require("node:child_process");
const fs = require("node:fs");
const { builtinModules, createRequire, registerHooks } = require("node:module");
const net = require("node:net");
const path = require("node:path");
const { performance } = require("node:perf_hooks");
const { Readable } = require("node:stream");
const { pathToFileURL } = require("node:url");
const util = require("node:util");

const PROTOCOL = 1;
const LEVELS = ["error", "warning", "info", "debug"];
const EXIT_TIMEOUT_MS = 1000;
const CHECK_TIMEOUT_MS = 20000;
const MAX_CAUSES = 8;
// Captured here, because a task may replace the globals.
const { setImmediate, setTimeout } = globalThis;

const fd = Number(process.env.GRAPHILE_WORKER_HOST_FD);
// Child processes of tasks must not see it.
delete process.env.GRAPHILE_WORKER_HOST_FD;
process.title = "graphile-worker host (node)";
// For code that reads the name of the program.
process.argv[1] ??= "graphile-worker";
// Code that starts another Node with the options of this one must not start another host.
process.execArgv = process.execArgv.filter((option, place, all) => !/^--(eval|input-type)\b/.test(option) && all[place - 1] !== "--eval");

/** The worker's `hello` frame. */
let hello = { log_level: "info" };
/** Task functions by name, then by generation. */
const tasks = new Map();
/** Files that were loaded before. The next load must not come from a cache. */
const loadedFiles = new Set();
/** Running jobs, by the id of their run. */
const runs = new Map();
/** Calls to the worker without an answer so far, by id. */
const calls = new Map();
/** Names of queues by id: a queue is never renamed. */
const queueNames = new Map();
/** The run that the current code belongs to. */
const current = new AsyncLocalStorage();

// ---------------------------------------------------------------------------------------------------------------
// Frames. Those of one turn of the event loop are collected and sent in one write.

/** Reads bytes without Node's streams, which take longer than a small job. */
const onread = { buffer: Buffer.allocUnsafe(64 * 1024), callback: receive };
const socket = new net.Socket({ fd, readable: true, writable: true, onread });
let outgoing = [];
let doneIds = [];
let flushIsDue = false;
/** Pieces of a line whose end has not arrived yet. */
let unfinishedLine = [];
/** A run whose second line, the job, has not arrived yet. */
let halfRun = null;

function send(frame) {
  outgoing.push(JSON.stringify(frame));
  flushSoon();
}

function flushSoon() {
  if (flushIsDue) return;
  flushIsDue = true;
  setImmediate(flush);
}

function flush() {
  flushIsDue = false;
  const text = takeOutgoing();
  if (text !== "") socket.write(text);
}

/** All frames to be sent. `done` comes last, after everything that its runs have sent. */
function takeOutgoing() {
  if (doneIds.length > 0) {
    outgoing.push(JSON.stringify({ type: "done", ids: doneIds }));
    doneIds = [];
  }
  if (outgoing.length === 0) return "";
  const text = outgoing.join("\n") + "\n";
  outgoing = [];
  return text;
}

/** Sends the rest synchronously, just before the process ends. */
function flushAtOnce() {
  // Part of a frame may still be buffered by Node: another frame must not end up in the middle of it.
  if (socket.writableLength > 0) return;
  let rest = Buffer.from(takeOutgoing());
  for (let attempts = 0; rest.length > 0 && attempts < 1000; attempts++) {
    try {
      rest = rest.subarray(fs.writeSync(fd, rest));
    } catch (error) {
      if (error.code !== "EAGAIN") return;
    }
  }
}

function receive(length, buffer) {
  const bytes = buffer.subarray(0, length);
  const end = bytes.lastIndexOf(10);
  if (end === -1) {
    unfinishedLine.push(Buffer.from(bytes));
    return true;
  }
  const lines = textOf([...unfinishedLine, bytes.subarray(0, end)]).split("\n");
  unfinishedLine = end + 1 < length ? [Buffer.from(bytes.subarray(end + 1))] : [];
  const frames = framesIn(lines);
  // A job that waited behind a long one may be aborted already: then it does not start.
  const unwanted = new Set();
  for (const frame of frames) if (frame.type === "abort") unwanted.add(frame.id);
  for (const frame of frames) handle(frame, unwanted);
  return true;
}

function textOf(pieces) {
  return (pieces.length === 1 ? pieces[0] : Buffer.concat(pieces)).toString();
}

/** Does not parse the second line of a run: few tasks read their job, and that line is the longer one. */
function framesIn(lines) {
  const frames = [];
  for (const line of lines) {
    if (halfRun) {
      halfRun.jobText = line;
      frames.push(halfRun);
      halfRun = null;
      continue;
    }
    const frame = JSON.parse(line);
    if (frame.type === "run") halfRun = frame;
    else frames.push(frame);
  }
  return frames;
}

let loading = Promise.resolve();

function handle(frame, unwanted) {
  switch (frame.type) {
    case "run":
      if (unwanted.has(frame.id)) fail(frame.id, new Error("aborted before it started"));
      else run(frame);
      return;
    case "abort":
      runs.get(frame.id)?.abort(frame.reason);
      return;
    case "result":
      answer(frame);
      return;
    case "ping":
      send({ type: "pong", id: frame.id, busy: busy() });
      return;
    case "load":
      // One after the other: if a file ends this process, the worker knows which one it was.
      loading = loading.then(() => load(frame));
      return;
    case "unload":
      tasks.delete(frame.task);
      return;
    case "database":
      databaseIs(frame.url);
      return;
    case "hello":
      hello = frame;
      removeNamesOfEval();
      send({ type: "hello", protocol: PROTOCOL, language: "javascript", version: process.version, pid: process.pid });
      return;
    // Other frames belong to a later version of the protocol.
  }
}

/**
 * Removes the global names that Node defines for evaluated code, and that modules do not have elsewhere. Called after the
 * evaluation, because Node defines one of them again at its end.
 */
function removeNamesOfEval() {
  const names = ["require", "module", "exports", "__filename", "__dirname", ...builtinModules];
  for (const name of names) if (!["console", "crypto", "process"].includes(name)) delete globalThis[name];
}

let utilization = performance.eventLoopUtilization();
let waited = waitedForACore();

/** The share of time since the last call in which this host was working. Time in which it waited for a core is left out. */
function busy() {
  const [before, waitedBefore] = [utilization, waited];
  utilization = performance.eventLoopUtilization();
  waited = waitedForACore();
  const { active, idle } = performance.eventLoopUtilization(utilization, before);
  const worked = Math.max(0, active - (waited - waitedBefore));
  return worked / (worked + idle || 1);
}

/** How many milliseconds this process has waited for a free core, if the system has `/proc`. */
function waitedForACore() {
  try {
    return Number(fs.readFileSync("/proc/self/schedstat", "latin1").split(" ")[1]) / 1e6 || 0;
  } catch {
    return 0;
  }
}

// ---------------------------------------------------------------------------------------------------------------
// Loading task files.

async function load({ task, path: file, generation }) {
  try {
    if (loadedFiles.has(file)) {
      forget(file);
      expectChanges();
    }
    const url = pathToFileURL(file).href;
    const found = taskIn(await import(mayHaveChanged ? ofGeneration(url, ++lastGeneration) : url));
    if (typeof found !== "function") {
      throw new Error(`${file} exports ${found === null ? "null" : `a value of type ${typeof found}`}, expected a function`);
    }
    loadedFiles.add(file);
    const generations = tasks.get(task) ?? new Map();
    // Keeps the last version, which jobs that are being sent may still name.
    const newest = Math.max(...generations.keys());
    for (const old of generations.keys()) if (old < newest) generations.delete(old);
    tasks.set(task, generations.set(generation, found));
    send({ type: "loaded", task, generation });
  } catch (error) {
    loadedFiles.add(file);
    send({ type: "not_loaded", task, generation, error: await withPlace(describe(explained(error, file)), error, file) });
  }
}

/** The function of `module.exports =`, of `export default`, or of one compiled into the other. */
function taskIn(module) {
  let value = module;
  for (let depth = 0; depth < 3 && typeof value !== "function" && value?.default !== undefined; depth++) {
    value = value.default;
  }
  return value;
}

/** Whether any file was loaded a second time. From then on, no load uses Node's cache of modules. */
let mayHaveChanged = false;
/** Counted over all tasks: two may import the same module, and each needs the version at the time of its load. */
let lastGeneration = 0;

/** Makes a module load its imports from the project again. Needs Node 22.15 or 23.5. */
function expectChanges() {
  if (!mayHaveChanged) registerHooks?.({ resolve: inTheSameGeneration });
  mayHaveChanged = true;
}

/** Node takes a module with another address for another module. */
function ofGeneration(address, generation) {
  const url = new URL(address);
  url.searchParams.set("generation", generation);
  return url.href;
}

function inTheSameGeneration(specifier, context, next) {
  const found = next(specifier, context);
  const [, generation] = /[?&]generation=(\d+)/.exec(context.parentURL) ?? [];
  const isAnew = generation && context.conditions.includes("import") && isModuleOfProject(found.url);
  return isAnew ? { ...found, url: ofGeneration(found.url, generation) } : found;
}

/** A new address has no effect on CommonJS, which Node caches by path. */
function isModuleOfProject(url) {
  return url.startsWith("file:") && !url.includes("/node_modules/") && /\.m?[jt]s$/.test(new URL(url).pathname);
}

/** Makes Node load a CommonJS file again, with the files of the project that it requires. */
function forget(file) {
  const { cache } = createRequire(file);
  const known = new Set();
  (function visit(module) {
    if (!module || known.has(module) || module.filename.includes(`${path.sep}node_modules${path.sep}`)) return;
    known.add(module);
    module.children.forEach(visit);
    delete cache[module.filename];
  })(cache[fs.realpathSync(file)] ?? cache[file]);
}

function explained(error, file) {
  if (error?.code === "ERR_UNKNOWN_FILE_EXTENSION" && /\.m?ts$/.test(file)) {
    return new Error(
      `${file} is TypeScript, which Node ${process.version} cannot run: use Node 22.6 or later, or compile the file to JavaScript`,
    );
  }
  return error;
}

/** Adds the place of a syntax error. For ES modules, only `node --check` prints it. */
async function withPlace(described, error, file) {
  if (!(error instanceof SyntaxError) || described.stack) return described;
  const output = await new Promise((resolve) => {
    execFile(process.execPath, ["--check", file], { timeout: CHECK_TIMEOUT_MS }, (_, __, stderr) => resolve(stderr));
  });
  return { ...described, stack: placeIn(output) };
}

// ---------------------------------------------------------------------------------------------------------------
// Running jobs.

class Run {
  #controller;
  #abortPromise;
  #reason;
  #jobText;
  #job;

  constructor({ id, payload, jobText }) {
    this.id = id;
    this.payload = payload;
    this.#jobText = jobText;
  }

  get job() {
    this.#job ??= { ...revive(JSON.parse(this.#jobText)), payload: this.payload };
    return this.#job;
  }

  get abortSignal() {
    if (!this.#controller) {
      this.#controller = new AbortController();
      if (this.#reason) this.#controller.abort(this.#reason);
    }
    return this.#controller.signal;
  }

  get abortPromise() {
    if (!this.#abortPromise) {
      this.#abortPromise = new Promise((_, reject) => {
        const signal = this.abortSignal;
        if (signal.aborted) reject(signal.reason);
        else signal.addEventListener("abort", () => reject(signal.reason), { once: true });
      });
      // An unhandled rejection would end the process if the task does not use this promise.
      this.#abortPromise.catch(() => {});
    }
    return this.#abortPromise;
  }

  abort(reason) {
    this.#reason = new DOMException(reason, "AbortError");
    this.#controller?.abort(this.#reason);
  }
}

function run(frame) {
  const task = tasks.get(frame.task)?.get(frame.generation);
  if (!task) {
    fail(frame.id, new Error(`the task ${JSON.stringify(frame.task)} is not loaded in this host`));
    return;
  }
  const run = new Run(frame);
  runs.set(run.id, run);
  current.run(run, begin, run, task);
}

function begin(run, task) {
  const { id, payload } = run;
  try {
    const result = task(payload, Helpers.of(run));
    if (typeof result?.then === "function") {
      result.then((value) => finish(id, payload, value), (error) => fail(id, error));
    } else {
      finish(id, payload, result);
    }
  } catch (error) {
    fail(id, error);
  }
}

function finish(id, payload, value) {
  if (Array.isArray(value) && Array.isArray(payload)) {
    finishBatch(id, payload, value);
    return;
  }
  endRun(id);
  doneIds.push(id);
  flushSoon();
}

/** Ends a run whose task received an array and returned a result for each item. */
async function finishBatch(id, payload, values) {
  if (values.length !== payload.length) {
    log("warning", `the task returned ${values.length} results for ${payload.length} items: the job counts as done`);
    finish(id);
    return;
  }
  const settled = await Promise.allSettled(values);
  const items = settled.flatMap(({ status, reason }, place) => (status === "rejected" ? [[place, describe(reason)]] : []));
  if (items.length === 0) {
    finish(id);
    return;
  }
  endRun(id);
  send({ type: "failed", id, items });
}

function fail(id, error) {
  endRun(id);
  send({ type: "failed", id, error: describe(error) });
}

function endRun(id) {
  const run = runs.get(id);
  // Logs an unfinished line of output, so that it does not run into the next job's.
  for (const level in run?.begunLines) if (run.begunLines[level] !== "") log(level, run.begunLines[level], undefined, run);
  runs.delete(id);
}

/** An error as a frame carries it: its message, then where it happened. */
function describe(error, depth = 0) {
  try {
    return described(error, depth);
  } catch {
    // Reading the error throws another one.
    return { message: "the task threw an error that cannot be read" };
  }
}

function described(error, depth) {
  if (!util.types.isNativeError(error) && !(error instanceof Error)) {
    const message = typeof error?.message === "string" && error.message !== "" ? error.message : thrown(error);
    return { message, stack: typeof error?.stack === "string" ? framesOf(error.stack) : undefined };
  }
  const message = error.message || error.name || "an error without a message";
  let stack = [placeIn(error.stack), framesOf(error.stack)].filter(Boolean).join("\n");
  // An AggregateError often has no message of its own, only parts that have one.
  const causes = [...(error.cause === undefined ? [] : [error.cause]), ...(Array.isArray(error.errors) ? error.errors : [])];
  // Bounded, because an error can be its own cause, and can have a thousand parts.
  for (const value of depth < MAX_CAUSES ? causes.slice(0, MAX_CAUSES) : []) {
    const cause = describe(value, depth + 1);
    stack += `${stack && "\n"}caused by: ${cause.message}${cause.stack ? `\n${cause.stack}` : ""}`;
  }
  return { message: String(message), stack, ...breakOf(error) };
}

/** The fields of an error of `rateLimited`, besides its message. */
function breakOf({ rateLimitedFor, limit }) {
  if (typeof rateLimitedFor !== "number" || !(rateLimitedFor >= 0) || rateLimitedFor === Infinity) return {};
  return { rate_limited_for: rateLimitedFor, limit: typeof limit === "string" ? limit : undefined };
}

/** An error for tasks to throw: the job has not failed. Its limit, or the named one, is closed for this many seconds. */
function rateLimited(seconds, limit) {
  if (typeof seconds !== "number" || !(seconds >= 0) || seconds === Infinity) {
    throw new TypeError(`rateLimited: the delay must be a number of seconds and at least 0, got ${util.inspect(seconds)}`);
  }
  if (limit !== undefined && typeof limit !== "string") {
    throw new TypeError(`rateLimited: the limit must be a name such as "group:api", got ${util.inspect(limit)}`);
  }
  return Object.assign(new Error(`rate limited for ${seconds} s`), { rateLimitedFor: seconds, limit });
}

function thrown(value) {
  return typeof value === "string" && value !== "" ? value : `the task threw a value that is not an error: ${util.inspect(value)}`;
}

/** The lines before the message of a syntax error: the file, the line, and a mark below it. */
function placeIn(stack) {
  return /^\S.*:\d+\n[^]*?\^+(?=\s+\w*Error: )/.exec(String(stack ?? ""))?.[0] ?? "";
}

/** The frames of a stack, without the message, this file and Node's own files. */
function framesOf(stack) {
  const lines = String(stack ?? "").split("\n");
  return lines.filter((line) => /^\s+at /.test(line) && !/\[eval\]|\bnode:/.test(line)).join("\n");
}

// ---------------------------------------------------------------------------------------------------------------
// Helpers: what a task receives beside its payload. They also work if a task destructures the object.

const HELPERS = {
  job: (run) => run.job,
  logger: (run) => loggerOf(run, undefined),
  abortSignal: (run) => run.abortSignal,
  abortPromise: (run) => run.abortPromise,
  addJob: (run) => (identifier, payload, spec) => addJob(run.id, identifier, payload, spec),
  addJobs: (run) => (specs, jobKeyPreserveRunAt) => addJobs(run.id, specs, jobKeyPreserveRunAt),
  getQueueName: (run) => (id = run.job.job_queue_id) => getQueueName(run.id, id),
  withPgClient: () => withPgClient,
  query: () => query,
  debug: (run) => (message, ...parameters) => debug(run, message, parameters),
};

/**
 * Behaves like a plain object, but creates each helper when the task first uses it: most tasks use few, and creating an
 * object with only four getters takes 1.3 µs.
 */
class Helpers {
  #run;

  static #lazily = {
    get: (helpers, name) => helpers.#made(name)[name],
    has: (helpers, name) => name in helpers.#made(name),
    ownKeys: (helpers) => Reflect.ownKeys(helpers.#allMade()),
    getOwnPropertyDescriptor: (helpers, name) => Reflect.getOwnPropertyDescriptor(helpers.#made(name), name),
  };

  static of(run) {
    const helpers = new Helpers();
    helpers.#run = run;
    return new Proxy(helpers, Helpers.#lazily);
  }

  /** Not enumerable: a task that lists its helpers sees only those of Node's worker. */
  get rateLimited() {
    return rateLimited;
  }

  #made(name) {
    if (Object.hasOwn(HELPERS, name) && !Object.hasOwn(this, name)) this[name] = HELPERS[name](this.#run);
    return this;
  }

  #allMade() {
    for (const name in HELPERS) this.#made(name);
    return this;
  }

  [util.inspect.custom]() {
    return { ...this };
  }
}

/** A job with its times as dates, as `pg` reads it. */
function revive(raw) {
  const date = (text) => (text == null ? null : new Date(text));
  return {
    ...raw,
    is_available: raw.locked_at == null && raw.attempts < raw.max_attempts,
    run_at: date(raw.run_at),
    created_at: date(raw.created_at),
    updated_at: date(raw.updated_at),
    locked_at: date(raw.locked_at),
  };
}

function loggerOf(run, scope) {
  const at = (level) => (message, meta) => log(level, message, meta, run, scope);
  return {
    error: at("error"),
    warn: at("warning"),
    info: at("info"),
    debug: at("debug"),
    scope: (more) => loggerOf(run, { ...scope, ...more }),
  };
}

function log(level, message, meta, run = current.getStore(), scope) {
  if (LEVELS.indexOf(level) > LEVELS.indexOf(hello.log_level)) return;
  // The worker no longer knows a run that has ended.
  if (run && !runs.has(run.id)) scope = { task_identifier: run.job.task_identifier, job_id: run.job.id, ...scope };
  const frame = { type: "log", level, message: typeof message === "string" ? message : util.inspect(message), run: run?.id, scope };
  try {
    outgoing.push(JSON.stringify({ ...frame, meta }));
  } catch {
    // Circular objects and big integers are not JSON.
    outgoing.push(JSON.stringify({ ...frame, scope: undefined, meta: util.inspect(meta) }));
  }
  flushSoon();
}

/** Node's worker still has this helper, and reports that it was removed. */
function debug(run, message, parameters) {
  log("error", "helpers.debug has gone: call helpers.logger.debug", undefined, run);
  log("debug", message, { parameters }, run);
}

let lastCall = 0;

/** Calls a method of the worker. */
function call(run, method, params) {
  return new Promise((resolve, reject) => {
    const id = ++lastCall;
    send({ type: "call", id, run, method, params });
    calls.set(id, { resolve, reject });
  });
}

function answer({ id, value, error }) {
  const call = calls.get(id);
  calls.delete(id);
  if (error) call?.reject(Object.assign(new Error(error.message), error.code && { code: error.code }));
  else call?.resolve(value);
}

async function addJob(run, identifier, payload, spec = {}) {
  return revive(await call(run, "add_job", { identifier, payload: payload ?? {}, spec: specOf(spec, spec.jobKeyMode) }));
}

async function addJobs(run, specs, jobKeyPreserveRunAt) {
  const mode = jobKeyPreserveRunAt ? "preserve_run_at" : undefined;
  const jobs = specs.map((spec) => ({ identifier: spec.identifier, payload: spec.payload ?? {}, spec: specOf(spec, mode) }));
  // Node's worker ignores it silently.
  if (specs.some((spec) => spec.jobKeyMode)) log("warning", "addJobs ignores the jobKeyMode of a single job: use addJob instead", undefined, runs.get(run));
  return (await call(run, "add_jobs", { jobs })).map(revive);
}

/** Leaves out empty values, so that the database uses its defaults. */
function specOf({ queueName, runAt, maxAttempts, jobKey, priority, flags }, jobKeyMode) {
  return {
    queue_name: textOfNumber(queueName) || undefined,
    run_at: runAt ? new Date(runAt).toISOString() : undefined,
    max_attempts: numberOfText(maxAttempts) || undefined,
    job_key: textOfNumber(jobKey) || undefined,
    job_key_mode: jobKeyMode || undefined,
    priority: numberOfText(priority) || undefined,
    flags: flags || undefined,
  };
}

/** With Node's worker, the database casts numbers to text and text to numbers: a user's id may be a key. */
function textOfNumber(value) {
  return typeof value === "number" || typeof value === "bigint" ? String(value) : value;
}

function numberOfText(value) {
  return typeof value === "string" && /^[-+]?\d+$/.test(value) ? Number(value) : value;
}

function getQueueName(run, id) {
  if (id == null) return null;
  if (!queueNames.has(id)) {
    const name = call(run, "get_queue_name", { id });
    queueNames.set(id, name);
    name.then((found) => queueNames.set(id, found), () => queueNames.delete(id));
  }
  return queueNames.get(id);
}

/** A package of the project, or a dependency of its graphile-worker, which some package managers hide. */
function packageOfProject(name) {
  const ofProject = createRequire(path.join(hello.tasks_dir, "tasks.js"));
  const places = [() => ofProject, () => createRequire(ofProject.resolve("graphile-worker"))];
  for (const place of places) {
    try {
      return place()(name);
    } catch (error) {
      if (error.code !== "MODULE_NOT_FOUND") throw error;
    }
  }
}

let pool;
/** Whether the server has rejected an unencrypted connection. */
let mustEncrypt = false;

/** Translates the worker's URL for `pg`, which treats almost every sslmode as `verify-full`. */
function databaseOf(text) {
  if (!text) return {};
  const url = new URL(text);
  const parameter = (name) => url.searchParams.get(name) ?? undefined;
  const part = (encoded) => decodeURIComponent(encoded) || undefined;
  const mode = parameter("sslmode");
  const pem = (name) => {
    const value = parameter(name);
    return value && (value.startsWith("-----BEGIN") ? value : fs.readFileSync(value, "utf8"));
  };
  const database = {
    user: part(url.username),
    password: part(url.password),
    host: part(url.hostname.replace(/^\[(.*)\]$/, "$1")),
    port: Number(url.port) || undefined,
    database: part(url.pathname.slice(1)),
    options: parameter("options"),
  };
  const encrypts = mode === undefined || mode === "allow" ? mustEncrypt : mode !== "disable";
  if (!encrypts) return { ...database, ssl: false };
  const ssl = { ca: pem("sslrootcert"), cert: pem("sslcert"), key: pem("sslkey") };
  ssl.rejectUnauthorized = mode === "verify-ca" || mode === "verify-full";
  if (mode === "verify-ca") ssl.checkServerIdentity = () => undefined;
  return { ...database, ssl };
}

/** Uses this URL for new connections. Changes the existing pool, because runs may be waiting for its connections. */
function databaseIs(url) {
  hello.database_url = url;
  if (pool) Object.assign(pool.options, databaseOf(url));
}

/** Connections of the project's own `pg`. */
function pgPool() {
  if (pool) return pool;
  const pg = packageOfProject("pg");
  if (!pg) {
    throw new Error(
      `helpers.query and helpers.withPgClient need the package pg, which was not found in ${hello.tasks_dir} or above it: run \`npm install pg\` in the project`,
    );
  }
  pool = new pg.Pool({ ...databaseOf(hello.database_url), max: hello.max_pool_size });
  // A broken idle connection must not end the process.
  pool.on("error", (error) => log("warning", `an idle connection of helpers.query broke: ${error.message}`));
  return pool;
}

/** If the URL says nothing about encryption, encrypts once the server requires it, as the worker does. */
async function pgClient() {
  try {
    return await pgPool().connect();
  } catch (error) {
    if (error?.code !== "28000" || mustEncrypt) throw error;
    mustEncrypt = true;
    databaseIs(hello.database_url);
    return await pgPool().connect();
  }
}

async function withPgClient(callback) {
  const client = await pgClient();
  let broken = true;
  try {
    const result = await callback(client);
    broken = false;
    return result;
  } finally {
    // Closes the connection after a failure: the task may have left a transaction open.
    client.release(broken);
  }
}

/** Transient errors, with the first and the longest pause before a retry, in milliseconds. */
const TRANSIENT_ERRORS = new Map([
  ["40001", [50, 5_000]], // a serialization failure
  ["40P01", [50, 5_000]], // a deadlock
  ["57P03", [3_000, 120_000]], // the server is starting
  ["EHOSTUNREACH", [3_000, 120_000]],
  ["ETIMEDOUT", [3_000, 120_000]],
]);
const MAX_TRIES = 100;

/** The same, with retries after transient errors. */
withPgClient.withRetries = async (callback) => {
  for (let attempt = 0; ; attempt++) {
    try {
      return await withPgClient(callback);
    } catch (error) {
      const [first, longest] = TRANSIENT_ERRORS.get(error?.code) ?? [];
      if (first === undefined || attempt + 1 === MAX_TRIES) throw error;
      // With jitter, so that tasks do not all retry at the same moment.
      const wait = Math.min(longest, first * 1.5 ** attempt) * (0.5 + Math.random() / 2);
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }
};

function query(text, values) {
  return withPgClient((client) => client.query(text, values));
}

// ---------------------------------------------------------------------------------------------------------------
// The worker logs what tasks print, each line with its job.

/** Whether Node is printing a warning, for which it uses console.error. */
let isWarning = false;
const printers = process.listeners("warning");
process.removeAllListeners("warning");
process.on("warning", (warning) => {
  isWarning = true;
  try {
    for (const print of printers) print.call(process, warning);
  } finally {
    isWarning = false;
  }
});

for (const [method, level] of [["debug", "debug"], ["log", "info"], ["info", "info"], ["warn", "warning"], ["error", "error"]]) {
  console[method] = (...values) => log(isWarning ? "warning" : level, util.format(...values));
}
const outsideOfRuns = {};
for (const [stream, level] of [[process.stdout, "info"], [process.stderr, "warning"]]) {
  stream.write = (chunk, encoding, callback) => {
    const begun = ((current.getStore() ?? outsideOfRuns).begunLines ??= { info: "", warning: "" });
    const lines = (begun[level] + (typeof chunk === "string" ? chunk : Buffer.from(chunk).toString())).split("\n");
    begun[level] = lines.pop();
    for (const line of lines) log(level, line);
    const done = typeof encoding === "function" ? encoding : callback;
    if (done) process.nextTick(done);
    return true;
  };
}
Object.defineProperty(process, "stdin", { value: Readable.from([]), configurable: true });

// ---------------------------------------------------------------------------------------------------------------
// The end of the process: when the worker closes the socket, or dies, which closes it as well.

let isEnding = false;

async function end() {
  if (isEnding) return;
  isEnding = true;
  setTimeout(() => process.exit(), EXIT_TIMEOUT_MS).unref();
  await pool?.end().catch(() => {});
  process.exit();
}

// Node itself would only print the error, which the worker logs like any output. Code with its own listener decides alone.
process.on("uncaughtException", (error, origin) => {
  if (process.listenerCount("uncaughtException") > 1) return;
  const { message, stack } = describe(error);
  const what = origin === "unhandledRejection" ? "a promise was rejected and not handled" : "uncaught error";
  isEnding = true;
  send({ type: "fatal", error: { message: `${what}: ${message}`, stack } });
  process.exit(1);
});
process.on("exit", (code) => {
  // Names the run that calls process.exit: the other jobs are not the cause.
  const run = current.getStore();
  if (!isEnding && run && runs.has(run.id)) {
    send({ type: "fatal", run: run.id, error: { message: `the task called process.exit(${code})` } });
  }
  flushAtOnce();
});
// Only the worker handles these, and lets jobs finish. Some process managers send them to all processes.
for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"]) process.on(signal, () => {});

socket.on("end", end);
socket.resume();
socket.on("error", end);
})();
