// The host for JavaScript and TypeScript: runs task files for the worker that started this process.
// It speaks the protocol of docs/host-protocol.md over a socket, and leaves stdin, stdout and stderr to the tasks.
// Node evaluates it as global code: the function around it keeps its names out of the way of tasks.
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
const LONGEST_GOODBYE_MS = 1000;
const LONGEST_CHECK_MS = 20000;
const MOST_CAUSES = 8;
// A task may put others in their place.
const { setImmediate, setTimeout } = globalThis;

const fd = Number(process.env.GRAPHILE_WORKER_HOST_FD);
// Not for the processes that tasks start.
delete process.env.GRAPHILE_WORKER_HOST_FD;
process.title = "graphile-worker host (node)";
// Code that looks for the name of the program finds one.
process.argv[1] ??= "graphile-worker";
// Some start another Node with the options of this one: they are not to start another host.
process.execArgv = process.execArgv.filter((option, place, all) => !/^--(eval|input-type)\b/.test(option) && all[place - 1] !== "--eval");

/** What the worker said at the beginning. */
let hello = { log_level: "info" };
/** Task functions by name, then by generation. */
const tasks = new Map();
/** Files that were loaded before, so that the next load must not come from a cache. */
const loadedFiles = new Set();
/** Jobs that run, by the id of their run. */
const runs = new Map();
/** Calls to the worker that wait for their answer, by id. */
const calls = new Map();
/** Names of queues by id: a queue is never renamed. */
const queueNames = new Map();
/** The run that the current code belongs to. */
const current = new AsyncLocalStorage();

// ---------------------------------------------------------------------------------------------------------------
// Frames. What there is to say gathers while this turn of the event loop lasts, and goes out in one write.

/** Bytes go past the streams of Node, which would take longer than a small job. */
const onread = { buffer: Buffer.allocUnsafe(64 * 1024), callback: receive };
const socket = new net.Socket({ fd, readable: true, writable: true, onread });
let said = [];
let doneIds = [];
let flushIsDue = false;
/** Pieces of a line whose end has not come yet. */
let unfinishedLine = [];
/** A run whose second line, the job, has not come yet. */
let halfRun = null;

function say(frame) {
  said.push(JSON.stringify(frame));
  flushSoon();
}

function flushSoon() {
  if (flushIsDue) return;
  flushIsDue = true;
  setImmediate(flush);
}

function flush() {
  flushIsDue = false;
  const text = takeSaid();
  if (text !== "") socket.write(text);
}

/** Everything there is to say. Runs are done after all that was said during them. */
function takeSaid() {
  if (doneIds.length > 0) {
    said.push(JSON.stringify({ type: "done", ids: doneIds }));
    doneIds = [];
  }
  if (said.length === 0) return "";
  const text = said.join("\n") + "\n";
  said = [];
  return text;
}

/** For the moment before the process ends. */
function flushAtOnce() {
  // Half a frame may be on its way: what we have to say must not get into it.
  if (socket.writableLength > 0) return;
  let rest = Buffer.from(takeSaid());
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
  // A job that waited behind a long one may be unwanted by now: then it does not begin.
  const unwanted = new Set();
  for (const frame of frames) if (frame.type === "abort") unwanted.add(frame.id);
  for (const frame of frames) handle(frame, unwanted);
  return true;
}

function textOf(pieces) {
  return (pieces.length === 1 ? pieces[0] : Buffer.concat(pieces)).toString();
}

/** The second line of a run stays text until its task asks for the job: few do, and it is the longer one. */
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
      if (unwanted.has(frame.id)) fail(frame.id, new Error("aborted before it began"));
      else run(frame);
      return;
    case "abort":
      runs.get(frame.id)?.abort(frame.reason);
      return;
    case "result":
      answer(frame);
      return;
    case "ping":
      say({ type: "pong", id: frame.id, busy: busy() });
      return;
    case "load":
      // One after the other: should one of them end this process, the worker knows which.
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
      say({ type: "hello", protocol: PROTOCOL, language: "javascript", version: process.version, pid: process.pid });
      return;
    // Anything else is from a later version of the protocol.
  }
}

/**
 * To code that it evaluates, and so to all in this process, Node gives names that no module has elsewhere. Called when
 * that is over: then Node has put back one of them.
 */
function removeNamesOfEval() {
  const names = ["require", "module", "exports", "__filename", "__dirname", ...builtinModules];
  for (const name of names) if (!["console", "crypto", "process"].includes(name)) delete globalThis[name];
}

let utilization = performance.eventLoopUtilization();
let waited = waitedForACore();

/** The share of its time since it was last asked that this host was at work. What other processes took is not its time. */
function busy() {
  const [before, waitedBefore] = [utilization, waited];
  utilization = performance.eventLoopUtilization();
  waited = waitedForACore();
  const { active, idle } = performance.eventLoopUtilization(utilization, before);
  const worked = Math.max(0, active - (waited - waitedBefore));
  return worked / (worked + idle || 1);
}

/** The milliseconds for which something was to be done and no core was free, where the system says so. */
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
    // The newest but one may still be asked for by jobs that are on their way.
    const newest = Math.max(...generations.keys());
    for (const old of generations.keys()) if (old < newest) generations.delete(old);
    tasks.set(task, generations.set(generation, found));
    say({ type: "loaded", task, generation });
  } catch (error) {
    loadedFiles.add(file);
    say({ type: "not_loaded", task, generation, error: await withPlace(describe(explained(error, file)), error, file) });
  }
}

/** `module.exports =`, `export default`, or one compiled into the other. */
function taskIn(module) {
  let value = module;
  for (let depth = 0; depth < 3 && typeof value !== "function" && value?.default !== undefined; depth++) {
    value = value.default;
  }
  return value;
}

/** Whether any file was loaded a second time: nothing that is loaded from then on comes from Node's cache of modules. */
let mayHaveChanged = false;
/** Counted over all tasks: two may import the same module, and each is to have it as it is when it is loaded. */
let lastGeneration = 0;

/** Has the modules of the project that a module imports loaded anew with it, where Node can: since 22.15 and 23.5. */
function expectChanges() {
  if (!mayHaveChanged) registerHooks?.({ resolve: inTheSameGeneration });
  mayHaveChanged = true;
}

/** To Node, a module with another address is another module. */
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

/** If it is CommonJS in truth, nothing comes of its new address: Node knows CommonJS by the path. */
function isModuleOfProject(url) {
  return url.startsWith("file:") && !url.includes("/node_modules/") && /\.m?[jt]s$/.test(new URL(url).pathname);
}

/** Makes Node load a CommonJS file anew, with those files of the project that it requires. */
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
      `${file} is TypeScript, and Node ${process.version} does not run that: it takes Node 22.6 or later, or compile the file to JavaScript`,
    );
  }
  return error;
}

/** Of an ES module that cannot be read, Node keeps to itself where that is, and tells it only who asks by command. */
async function withPlace(described, error, file) {
  if (!(error instanceof SyntaxError) || described.stack) return described;
  const said = await new Promise((resolve) => {
    execFile(process.execPath, ["--check", file], { timeout: LONGEST_CHECK_MS }, (_, __, stderr) => resolve(stderr));
  });
  return { ...described, stack: placeIn(said) };
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
      // Who does not wait for it must not end the process by it.
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
  isOver(id);
  doneIds.push(id);
  flushSoon();
}

/** A task that gets an array may answer for each of its items. */
async function finishBatch(id, payload, values) {
  if (values.length !== payload.length) {
    log("warning", `the task returned ${values.length} results for ${payload.length} items: taken as done`);
    finish(id);
    return;
  }
  const settled = await Promise.allSettled(values);
  const items = settled.flatMap(({ status, reason }, place) => (status === "rejected" ? [[place, describe(reason)]] : []));
  if (items.length === 0) {
    finish(id);
    return;
  }
  isOver(id);
  say({ type: "failed", id, items });
}

function fail(id, error) {
  isOver(id);
  say({ type: "failed", id, error: describe(error) });
}

function isOver(id) {
  const run = runs.get(id);
  // What it has printed without the end of its line is not the next one's.
  for (const level in run?.begunLines) if (run.begunLines[level] !== "") log(level, run.begunLines[level], undefined, run);
  runs.delete(id);
}

/** An error as the worker wants it: what it says, then where it happened. */
function describe(error, depth = 0) {
  try {
    return described(error, depth);
  } catch {
    // Whatever it is, looking at it throws.
    return { message: "an error that cannot be read was thrown" };
  }
}

function described(error, depth) {
  if (!util.types.isNativeError(error) && !(error instanceof Error)) {
    const message = typeof error?.message === "string" && error.message !== "" ? error.message : thrown(error);
    return { message, stack: typeof error?.stack === "string" ? framesOf(error.stack) : undefined };
  }
  const message = error.message || error.name || "an error without a message";
  let stack = [placeIn(error.stack), framesOf(error.stack)].filter(Boolean).join("\n");
  // Of an AggregateError the message is often empty, and all there is to know is in its parts.
  const causes = [...(error.cause === undefined ? [] : [error.cause]), ...(Array.isArray(error.errors) ? error.errors : [])];
  // An error may be its own cause, and a thousand may be parts of one.
  for (const value of depth < MOST_CAUSES ? causes.slice(0, MOST_CAUSES) : []) {
    const cause = describe(value, depth + 1);
    stack += `${stack && "\n"}caused by: ${cause.message}${cause.stack ? `\n${cause.stack}` : ""}`;
  }
  return { message: String(message), stack };
}

function thrown(value) {
  return typeof value === "string" && value !== "" ? value : `a value that is no error was thrown: ${util.inspect(value)}`;
}

/** What stands before the message where code could not be read: the file, the line, and a mark below it. */
function placeIn(stack) {
  return /^\S.*:\d+\n[^]*?\^+(?=\s+\w*Error: )/.exec(String(stack ?? ""))?.[0] ?? "";
}

/** The lines of a stack that say where, without the message, this file and what is Node's own. */
function framesOf(stack) {
  const lines = String(stack ?? "").split("\n");
  return lines.filter((line) => /^\s+at /.test(line) && !/\[eval\]|\bnode:/.test(line)).join("\n");
}

// ---------------------------------------------------------------------------------------------------------------
// Helpers: what a task gets beside its payload. They work when they are taken out of the object.

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
 * To its task an object like any other, but a helper is made when somebody looks at it: most jobs look at few, and an
 * object with four getters alone takes 1.3 µs to make.
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

/** A job with its times as dates, as `pg` would read it. */
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
  // Of a run that is over the worker knows nothing any more.
  if (run && !runs.has(run.id)) scope = { task_identifier: run.job.task_identifier, job_id: run.job.id, ...scope };
  const frame = { type: "log", level, message: typeof message === "string" ? message : util.inspect(message), run: run?.id, scope };
  try {
    said.push(JSON.stringify({ ...frame, meta }));
  } catch {
    // Circles and big integers are not JSON.
    said.push(JSON.stringify({ ...frame, scope: undefined, meta: util.inspect(meta) }));
  }
  flushSoon();
}

/** Node's worker has it still, and says that it is gone. */
function debug(run, message, parameters) {
  log("error", "helpers.debug has gone: call helpers.logger.debug", undefined, run);
  log("debug", message, { parameters }, run);
}

let lastCall = 0;

/** Asks the worker. */
function call(run, method, params) {
  return new Promise((resolve, reject) => {
    const id = ++lastCall;
    say({ type: "call", id, run, method, params });
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
  // Node's worker skips it without a word.
  if (specs.some((spec) => spec.jobKeyMode)) log("warning", "addJobs skips the jobKeyMode of a single job: use addJob for that", undefined, runs.get(run));
  return (await call(run, "add_jobs", { jobs })).map(revive);
}

/** What is empty is left to the database. */
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

/** Under Node's worker the database makes the one of the other: the id of a user may be a key. */
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

/** A package of the project; or one that its graphile-worker has brought along, which some package managers hide. */
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
/** Whether the server has refused connections that are not encrypted. */
let mustEncrypt = false;

/** What the worker's URL means to `pg`, which takes almost every sslmode for one that verifies the name of the host. */
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

/** New connections go there. A new pool would not serve those who wait for a connection of the old one. */
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
      `helpers.query and helpers.withPgClient need the package pg, and ${hello.tasks_dir} and the folders above it have none: run \`npm install pg\` in the project`,
    );
  }
  pool = new pg.Pool({ ...databaseOf(hello.database_url), max: hello.max_pool_size });
  // A connection that breaks while nobody uses it is no reason to end.
  pool.on("error", (error) => log("warning", `an idle connection of helpers.query broke: ${error.message}`));
  return pool;
}

/** As the worker does, if nothing is said about encryption: with it, if the server does not accept less. */
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
    // A transaction that a failed task left open must not be the next task's.
    client.release(broken);
  }
}

/** Errors that go away by themselves, and how long to wait for that at first and at most, in milliseconds. */
const PASSING_ERRORS = new Map([
  ["40001", [50, 5_000]], // two transactions met
  ["40P01", [50, 5_000]], // a deadlock
  ["57P03", [3_000, 120_000]], // the server starts
  ["EHOSTUNREACH", [3_000, 120_000]],
  ["ETIMEDOUT", [3_000, 120_000]],
]);
const MOST_TRIES = 100;

/** The same, again and again while it fails for a reason that passes. */
withPgClient.withRetries = async (callback) => {
  for (let attempt = 0; ; attempt++) {
    try {
      return await withPgClient(callback);
    } catch (error) {
      const [first, longest] = PASSING_ERRORS.get(error?.code) ?? [];
      if (first === undefined || attempt + 1 === MOST_TRIES) throw error;
      // Not all at the same moment.
      const wait = Math.min(longest, first * 1.5 ** attempt) * (0.5 + Math.random() / 2);
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }
};

function query(text, values) {
  return withPgClient((client) => client.query(text, values));
}

// ---------------------------------------------------------------------------------------------------------------
// What tasks print goes to the worker's log, with the job they print it for.

/** Node prints its warnings by console.error. */
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
const nobody = {};
for (const [stream, level] of [[process.stdout, "info"], [process.stderr, "warning"]]) {
  stream.write = (chunk, encoding, callback) => {
    const begun = ((current.getStore() ?? nobody).begunLines ??= { info: "", warning: "" });
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
// Living and ending. The worker says when: by closing the socket, or by dying, which closes it too.

let isEnding = false;

async function end() {
  if (isEnding) return;
  isEnding = true;
  setTimeout(() => process.exit(), LONGEST_GOODBYE_MS).unref();
  await pool?.end().catch(() => {});
  process.exit();
}

// Node would print the error where nobody knows that it is one. Code that has its own listener decides by itself.
process.on("uncaughtException", (error, origin) => {
  if (process.listenerCount("uncaughtException") > 1) return;
  const { message, stack } = describe(error);
  const what = origin === "unhandledRejection" ? "a promise was rejected and not handled" : "uncaught error";
  isEnding = true;
  say({ type: "fatal", error: { message: `${what}: ${message}`, stack } });
  process.exit(1);
});
process.on("exit", (code) => {
  // Code that ends the process does so in the run it belongs to: the jobs beside it have nothing to do with it.
  const run = current.getStore();
  if (!isEnding && run && runs.has(run.id)) {
    say({ type: "fatal", run: run.id, error: { message: `the task called process.exit(${code})` } });
  }
  flushAtOnce();
});
// These are for the worker, which lets jobs finish; some process managers send them to all processes.
for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"]) process.on(signal, () => {});

socket.on("end", end);
socket.resume();
socket.on("error", end);
})();
