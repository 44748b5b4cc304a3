//! Our worker as a contestant: each command of the controller, run with the library. `protocol` talks to the
//! controller.

use crate::Failure;
use crate::contestant::{NODE, folder};
use crate::protocol::{self, Task, line_received, pause, ready, send_line, unix_seconds};
use graphile_worker::{
    FetchEmpty, IntoTaskHandlerResult, JobEventContext, JobSpec, JobSuccess, RawJobSpec, TaskHandler, TaskOptions,
    Worker, WorkerContext, WorkerEventContext, WorkerOptions,
};
use graphile_worker_scripts::{HostOptions, TasksDir};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio::task::{JoinHandle, JoinSet};

/// Number of concurrent callers of `add_raw_job`.
const ADDERS: usize = 32;

/// In `churn`, the number of jobs added at a time, and the maximum number that wait.
const STREAM_BATCH: u64 = 500;
const STREAM_WAITING: u64 = 5_000;

/// The poll interval of workers that must not poll.
const NO_POLLS: Duration = Duration::from_secs(3600);

/// How long workers that wait for jobs may take to connect, listen, and look for jobs once.
const SETTLING: Duration = Duration::from_millis(500);

static JOBS: AtomicU64 = AtomicU64::new(0);
/// When the last job ended: the bits of an `f64`, in seconds since 1970.
static LAST: AtomicU64 = AtomicU64::new(0);
/// The number of claims that found no jobs.
static EMPTY_CLAIMS: AtomicU64 = AtomicU64::new(0);
static LATENCIES: Mutex<Vec<f64>> = Mutex::new(Vec::new());
static ORDER: LazyLock<Mutex<Order>> = LazyLock::new(Mutex::default);
/// How many milliseconds a job of the task `recorded` takes, and the runs of the task.
static RECORDED_MS: AtomicU64 = AtomicU64::new(0);
static RUNS: Mutex<Vec<Value>> = Mutex::new(Vec::new());
static STARTED: Notify = Notify::const_new();

pub(crate) async fn run(task: &Task) -> Result<(), Failure> {
    let figures = match task.command.as_str() {
        "install" => install(task).await?,
        "bulk_add" => bulk_add(task).await?,
        "drain" => drain(task).await?,
        "latency" => latency(task).await?,
        "latency_sql" | "queues" => run_until_stopped(task).await?,
        "start_stop" => start_stop(task).await?,
        "adds" => adds(task).await?,
        "churn" => churn(task, None).await?,
        "fleet" => fleet(task).await?,
        "recorded" => recorded(task).await?,
        "churn_keys" => churn(task, Some(task.number)).await?,
        "idle" => idle(task).await?,
        _ => return Err(task.unknown_command()),
    };
    protocol::finish(&figures)
}

fn options(task: &Task) -> WorkerOptions {
    let options = WorkerOptions::default().database_url(&task.url);
    let (tasks, concurrency) = task.variant.split_once('-').unwrap_or((&task.variant, ""));
    let options = match concurrency.parse() {
        Ok(concurrency) => options.concurrency(concurrency),
        Err(_) => options,
    };
    let with_files = |options: WorkerOptions| {
        options.task_source(
            TasksDir::new(folder().join("tasks").join(tasks)).host_options(HostOptions::default().node(&*NODE)),
        )
    };
    match (tasks, task.command.as_str()) {
        ("javascript", "drain") => with_files(options),
        ("javascript" | "python", _) => {
            with_files(options).on(JobSuccess, |ended: JobEventContext| async move { file_ended(&ended) })
        }
        ("repeatable", _) => {
            let repeatable = || TaskOptions::default().repeatable(true);
            let options = with_tasks(options).task_options(Trivial::IDENTIFIER, repeatable());
            options.task_options(Timed::IDENTIFIER, repeatable())
        }
        _ => with_tasks(options),
    }
}

fn with_tasks(options: WorkerOptions) -> WorkerOptions {
    options.define_job::<Trivial>().define_job::<Timed>().define_job::<Ordered>().define_job::<Recorded>()
}

async fn install(task: &Task) -> Result<Value, Failure> {
    options(task).init().await?;
    ready().await?;
    Ok(json!({}))
}

async fn bulk_add(task: &Task) -> Result<Value, Failure> {
    let utils = options(task).init().await?.create_utils();
    let specs: Vec<RawJobSpec> = (1..=task.number).map(trivial).collect();
    ready().await?;
    let added = utils.add_raw_jobs(&specs).await?.len();
    Ok(json!({ "jobs": added, "last": unix_seconds() }))
}

async fn drain(task: &Task) -> Result<Value, Failure> {
    let worker = options(task).init().await?;
    ready().await?;
    worker.run_once().await?;
    Ok(what_ran())
}

async fn run_until_stopped(task: &Task) -> Result<Value, Failure> {
    let worker = Arc::new(options(task).init().await?);
    ready().await?;
    let running = start(&worker);
    report_progress_until_stopped().await?;
    worker.request_shutdown();
    running.await??;
    Ok(what_ran())
}

async fn latency(task: &Task) -> Result<Value, Failure> {
    let worker = Arc::new(options(task).init().await?);
    let utils = worker.create_utils();
    let running = start(&worker);
    tokio::time::sleep(SETTLING).await;
    ready().await?;
    for sample in 0..task.number {
        utils.add_job(Timed { at: unix_seconds() }, JobSpec::default()).await?;
        STARTED.notified().await;
        tokio::time::sleep(pause(sample)).await;
    }
    worker.request_shutdown();
    running.await??;
    Ok(what_ran())
}

async fn start_stop(task: &Task) -> Result<Value, Failure> {
    ready().await?;
    let mut seconds = Vec::new();
    for _ in 0..task.number {
        let started = Instant::now();
        options(task).init().await?.run_once().await?;
        seconds.push(started.elapsed().as_secs_f64());
    }
    Ok(json!({ "seconds": seconds }))
}

async fn adds(task: &Task) -> Result<Value, Failure> {
    let utils = options(task).init().await?.create_utils();
    ready().await?;
    let jobs = task.number;
    let next = Arc::new(AtomicU64::new(0));
    let mut adders = JoinSet::new();
    for _ in 0..ADDERS {
        let (utils, next) = (utils.clone(), next.clone());
        adders.spawn(async move {
            while next.fetch_add(1, Ordering::Relaxed) < jobs {
                utils.add_raw_job(Trivial::IDENTIFIER, json!({}), JobSpec::default()).await?;
            }
            Ok::<(), graphile_worker::Error>(())
        });
    }
    while let Some(adder) = adders.join_next().await {
        adder??;
    }
    Ok(json!({ "jobs": jobs, "last": unix_seconds() }))
}

/// Adds jobs as fast as they run, until `stop`: without a queue, or spread over this many queues.
async fn churn(task: &Task, queues: Option<u64>) -> Result<Value, Failure> {
    let worker = Arc::new(options(task).init().await?);
    let utils = worker.create_utils();
    ready().await?;
    let running = start(&worker);
    let adding: JoinHandle<Result<(), graphile_worker::Error>> = tokio::spawn(async move {
        let mut added = 0;
        loop {
            if added < JOBS.load(Ordering::Relaxed) + STREAM_WAITING {
                let specs: Vec<RawJobSpec> = (added..added + STREAM_BATCH).map(|id| streamed(id, queues)).collect();
                utils.add_raw_jobs(&specs).await?;
                added += STREAM_BATCH;
            } else {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    });
    report_progress_until_stopped().await?;
    if adding.is_finished() {
        adding.await??;
    } else {
        adding.abort();
    }
    worker.request_shutdown();
    running.await??;
    Ok(what_ran())
}

/// A worker that is idle before the clock starts.
async fn fleet(task: &Task) -> Result<Value, Failure> {
    let worker = Arc::new(options(task).init().await?);
    let running = start(&worker);
    tokio::time::sleep(SETTLING).await;
    ready().await?;
    report_progress_until_stopped().await?;
    worker.request_shutdown();
    running.await??;
    Ok(what_ran())
}

/// A worker that is idle before the clock starts, and whose jobs take `number` milliseconds. Reports each of their runs.
async fn recorded(task: &Task) -> Result<Value, Failure> {
    RECORDED_MS.store(task.number, Ordering::Relaxed);
    let mut ran = fleet(task).await?;
    ran["runs"] = std::mem::take(&mut *lock(&RUNS)).into();
    Ok(ran)
}

/// As many workers as `number` says, which do not poll, so that each of their claims has a cause.
async fn idle(task: &Task) -> Result<Value, Failure> {
    let mut workers = Vec::new();
    for _ in 0..task.number {
        let options = options(task).poll_interval(NO_POLLS).on(FetchEmpty, |_: WorkerEventContext| async {
            EMPTY_CLAIMS.fetch_add(1, Ordering::Relaxed);
        });
        let worker = Arc::new(options.init().await?);
        workers.push((worker.clone(), start(&worker)));
    }
    tokio::time::sleep(SETTLING).await;
    ready().await?;
    let before = EMPTY_CLAIMS.load(Ordering::Relaxed);
    line_received().await?;
    let empty_claims = EMPTY_CLAIMS.load(Ordering::Relaxed) - before;
    for (worker, running) in workers {
        worker.request_shutdown();
        running.await??;
    }
    let mut ran = what_ran();
    ran["empty_claims"] = empty_claims.into();
    Ok(ran)
}

fn streamed(id: u64, queues: Option<u64>) -> RawJobSpec {
    let queue = queues.map(|queues| format!("key {}", id % queues));
    RawJobSpec { spec: JobSpec { queue_name: queue, ..JobSpec::default() }, ..trivial(id) }
}

fn trivial(id: u64) -> RawJobSpec {
    RawJobSpec { identifier: Trivial::IDENTIFIER.to_owned(), payload: json!({ "id": id }), spec: JobSpec::default() }
}

fn start(worker: &Arc<Worker>) -> JoinHandle<Result<(), graphile_worker::Error>> {
    let worker = worker.clone();
    tokio::spawn(async move { worker.run().await })
}

async fn report_progress_until_stopped() -> Result<(), Failure> {
    let stop = tokio::spawn(line_received());
    let mut ticks = tokio::time::interval(Duration::from_millis(20));
    let mut reported = 0;
    while !stop.is_finished() {
        ticks.tick().await;
        let jobs = JOBS.load(Ordering::Relaxed);
        if jobs != reported {
            reported = jobs;
            send_line(&format!("at {jobs}"));
        }
    }
    Ok(())
}

fn what_ran() -> Value {
    let order = lock(&ORDER);
    let (jobs, last) = ran_in_hosts();
    json!({
        "jobs": JOBS.load(Ordering::Relaxed) + jobs,
        "last": f64::from_bits(LAST.load(Ordering::Relaxed)).max(last),
        "latencies": latencies(),
        "out_of_order": order.out_of_order,
        "at_once": order.at_once,
    })
}

/// The number of jobs that tasks/javascript/trivial.js has counted in all hosts, and when the last one ended.
fn ran_in_hosts() -> (u64, f64) {
    let text = take_measurements("ran").unwrap_or_default();
    let hosts = text.lines().filter_map(|line| line.split_once(' '));
    let hosts = hosts.filter_map(|(jobs, last)| Some((jobs.parse::<u64>().ok()?, last.parse::<f64>().ok()?)));
    hosts.fold((0, 0.0), |(all, latest), (jobs, last)| (all + jobs, last.max(latest)))
}

/// The latencies that the handlers in this process measured, or that tasks/javascript/timed.js measured in its host.
fn latencies() -> Vec<f64> {
    match take_measurements("latencies") {
        Some(text) => text.lines().filter_map(|line| line.parse().ok()).collect(),
        None => lock(&LATENCIES).clone(),
    }
}

/// Reads and deletes the file into which task files write their measurements for this worker.
fn take_measurements(what: &str) -> Option<String> {
    let file = std::env::temp_dir().join(format!("graphile-worker-bench-{what}-{}", std::process::id()));
    let text = std::fs::read_to_string(&file).ok()?;
    let _ = std::fs::remove_file(file);
    Some(text)
}

/// Counts the job for task files that do not count themselves.
fn file_ended(ended_job: &JobEventContext) {
    ended();
    if &*ended_job.job.task_identifier == Timed::IDENTIFIER {
        timed_started();
    }
}

fn timed_started() {
    send_line(&format!("at {}", JOBS.load(Ordering::Relaxed)));
    STARTED.notify_one();
}

fn ended() {
    JOBS.fetch_add(1, Ordering::Relaxed);
    LAST.store(unix_seconds().to_bits(), Ordering::Relaxed);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A task that only counts its jobs.
#[derive(Serialize, Deserialize)]
struct Trivial {}

impl TaskHandler for Trivial {
    const IDENTIFIER: &'static str = "trivial";

    async fn run(self, _ctx: WorkerContext) -> impl IntoTaskHandlerResult {
        ended();
    }
}

/// A task that measures how long ago its job was added.
#[derive(Serialize, Deserialize)]
struct Timed {
    at: f64,
}

impl TaskHandler for Timed {
    const IDENTIFIER: &'static str = "timed";

    async fn run(self, _ctx: WorkerContext) -> impl IntoTaskHandlerResult {
        let latency = unix_seconds() - self.at;
        lock(&LATENCIES).push(latency);
        ended();
        timed_started();
    }
}

/// A task that takes a while, and records each run. It ends early if it is cancelled.
#[derive(Serialize, Deserialize)]
struct Recorded {
    #[serde(default)]
    queue: i64,
    /// How long it takes, if that differs from the other jobs.
    #[serde(default)]
    ms: Option<u64>,
}

impl TaskHandler for Recorded {
    const IDENTIFIER: &'static str = "recorded";

    async fn run(self, ctx: WorkerContext) -> impl IntoTaskHandlerResult {
        let began = unix_seconds();
        let ms = self.ms.unwrap_or_else(|| RECORDED_MS.load(Ordering::Relaxed));
        if ms > 0 {
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(ms)) => {}
                () = ctx.cancelled() => {}
            }
        }
        let claimed = ctx.job().locked_at.map_or(0.0, |claimed| claimed.timestamp_micros() as f64 / 1e6);
        lock(&RUNS).push(json!({ "claimed": claimed, "began": began, "ended": unix_seconds(), "queue": self.queue }));
        ended();
    }
}

/// A task that checks that its queue runs in order, one job at a time.
#[derive(Serialize, Deserialize)]
struct Ordered {
    id: i64,
    queue: i64,
}

impl TaskHandler for Ordered {
    const IDENTIFIER: &'static str = "ordered";

    async fn run(self, _ctx: WorkerContext) -> impl IntoTaskHandlerResult {
        lock(&ORDER).begin(self.queue, self.id);
        // Give another job of the queue the chance to overlap, which must not happen.
        tokio::task::yield_now().await;
        lock(&ORDER).end(self.queue);
        ended();
    }
}

/// For each queue, the last job and the number of running jobs; for all queues, the violations.
#[derive(Default)]
struct Order {
    queues: HashMap<i64, (i64, i64)>,
    out_of_order: u64,
    at_once: i64,
}

impl Order {
    fn begin(&mut self, queue: i64, id: i64) {
        let (last, running) = self.queues.entry(queue).or_default();
        self.out_of_order += u64::from(id <= *last);
        *last = id;
        *running += 1;
        self.at_once = self.at_once.max(*running);
    }

    fn end(&mut self, queue: i64) {
        self.queues.entry(queue).or_default().1 -= 1;
    }
}
