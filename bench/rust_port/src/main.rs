//! The `graphile_worker` of crates.io as a contestant: the same commands, and the same lines on stdin and stdout, as
//! the others (see `bench/src/child.rs`).
//!
//! ```text
//! graphile_worker_bench_rust_port VARIANT COMMAND URL [NUMBER]
//! ```
//!
//! `VARIANT` is `default` or `tuned`. `run_once` ignores the tuned settings, so a tuned worker uses `run` until
//! the controller sends `stop`.

use graphile_worker::{
    IntoTaskHandlerResult, JobSpec, LocalQueueConfig, RawJobSpec, TaskHandler, Worker, WorkerContext, WorkerOptions,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::Notify;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The poll interval of workers that must not poll.
const NO_POLLS: Duration = Duration::from_secs(3600);

/// How long workers that wait for jobs may take to connect, listen, and look for jobs once.
const SETTLING: Duration = Duration::from_millis(500);

static JOBS: AtomicU64 = AtomicU64::new(0);
static LAST: AtomicU64 = AtomicU64::new(0);
static LATENCIES: Mutex<Vec<f64>> = Mutex::new(Vec::new());
static ORDER: LazyLock<Mutex<Order>> = LazyLock::new(Mutex::default);
static STARTED: Notify = Notify::const_new();

/// Counts its jobs, and stores the time of the last one.
#[derive(Serialize, Deserialize)]
struct Trivial {}

impl TaskHandler for Trivial {
    const IDENTIFIER: &'static str = "trivial";

    async fn run(self, _ctx: WorkerContext) -> impl IntoTaskHandlerResult {
        ended();
    }
}

/// Measures how long ago its job was added.
#[derive(Serialize, Deserialize)]
struct Timed {
    at: f64,
}

impl TaskHandler for Timed {
    const IDENTIFIER: &'static str = "timed";

    async fn run(self, _ctx: WorkerContext) -> impl IntoTaskHandlerResult {
        let latency = unix_seconds() - self.at;
        LATENCIES.lock().expect("no panic").push(latency);
        ended();
        say(&format!("at {}", JOBS.load(Ordering::Relaxed)));
        STARTED.notify_one();
    }
}

/// Checks that its queue runs in order, one job at a time.
#[derive(Serialize, Deserialize)]
struct Ordered {
    id: i64,
    queue: i64,
}

impl TaskHandler for Ordered {
    const IDENTIFIER: &'static str = "ordered";

    async fn run(self, _ctx: WorkerContext) -> impl IntoTaskHandlerResult {
        ORDER.lock().expect("no panic").begin(self.queue, self.id);
        tokio::task::yield_now().await;
        ORDER.lock().expect("no panic").end(self.queue);
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

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [variant, command, url, ..] = &arguments[..] else {
        return Err("expected VARIANT COMMAND URL [NUMBER]".into());
    };
    let number = arguments.get(3).map_or(Ok(0), |number| number.parse::<u64>())?;
    let figures = match command.as_str() {
        "install" => install(variant, url).await?,
        "bulk_add" => bulk_add(variant, url, number).await?,
        "drain" => drain(variant, url).await?,
        "latency" => latency(variant, url, number).await?,
        "latency_sql" | "queues" => run_until_stopped(variant, url).await?,
        "start_stop" => start_stop(variant, url, number).await?,
        "adds" => adds(variant, url, number).await?,
        "fleet" => fleet(variant, url).await?,
        "idle" => idle(variant, url, number).await?,
        unknown => return Err(format!("the command is {unknown:?}, expected one of the controller's").into()),
    };
    say(&figures.to_string());
    // The controller reads the CPU time and memory of this process before it lets it exit.
    for line in std::io::stdin().lock().lines() {
        line?;
    }
    // Do not wait for background tasks.
    std::process::exit(0);
}

fn options(variant: &str, url: &str) -> WorkerOptions {
    let options = WorkerOptions::default()
        .database_url(url)
        .concurrency(24)
        .listen_os_shutdown_signals(false)
        .define_job::<Trivial>()
        .define_job::<Timed>()
        .define_job::<Ordered>();
    if variant != "tuned" {
        return options;
    }
    options
        .local_queue(LocalQueueConfig::default().with_size(500))
        .complete_job_batch_delay(Duration::ZERO)
        .fail_job_batch_delay(Duration::ZERO)
}

async fn install(variant: &str, url: &str) -> Result<Value, Failure> {
    options(variant, url).init().await?;
    ready().await?;
    Ok(json!({}))
}

async fn bulk_add(variant: &str, url: &str, jobs: u64) -> Result<Value, Failure> {
    let utils = options(variant, url).init().await?.create_utils();
    let job = |id| RawJobSpec {
        identifier: Trivial::IDENTIFIER.to_owned(),
        payload: json!({ "id": id }),
        spec: JobSpec::default(),
    };
    let specs: Vec<RawJobSpec> = (1..=jobs).map(job).collect();
    ready().await?;
    let added = utils.add_raw_jobs(&specs).await?.len();
    Ok(json!({ "jobs": added, "last": unix_seconds() }))
}

async fn drain(variant: &str, url: &str) -> Result<Value, Failure> {
    if variant == "tuned" {
        return run_until_stopped(variant, url).await;
    }
    let worker = options(variant, url).init().await?;
    ready().await?;
    worker.run_once().await?;
    Ok(what_ran())
}

async fn run_until_stopped(variant: &str, url: &str) -> Result<Value, Failure> {
    let worker = Arc::new(options(variant, url).init().await?);
    ready().await?;
    let running = start(&worker);
    report_until_stopped(&worker, running).await
}

/// A worker that is idle before the clock starts.
async fn fleet(variant: &str, url: &str) -> Result<Value, Failure> {
    let worker = Arc::new(options(variant, url).init().await?);
    let running = start(&worker);
    tokio::time::sleep(SETTLING).await;
    ready().await?;
    report_until_stopped(&worker, running).await
}

async fn report_until_stopped(worker: &Worker, running: tokio::task::JoinHandle<()>) -> Result<Value, Failure> {
    let stop = tokio::task::spawn_blocking(wait_for_a_line);
    let mut ticks = tokio::time::interval(Duration::from_millis(20));
    let mut reported = 0;
    while !stop.is_finished() {
        ticks.tick().await;
        let jobs = JOBS.load(Ordering::Relaxed);
        if jobs != reported {
            reported = jobs;
            say(&format!("at {jobs}"));
        }
    }
    worker.request_shutdown();
    // We measure how fast it runs, not how it stops.
    let _ = tokio::time::timeout(Duration::from_secs(10), running).await;
    Ok(what_ran())
}

/// As many workers as `number` says, which do not poll. With the default of 20 connections each, 64 workers would not get
/// them all.
async fn idle(variant: &str, url: &str, number: u64) -> Result<Value, Failure> {
    let mut workers = Vec::new();
    for _ in 0..number {
        let worker = Arc::new(options(variant, url).poll_interval(NO_POLLS).max_pg_conn(4).init().await?);
        workers.push((worker.clone(), start(&worker)));
    }
    tokio::time::sleep(SETTLING).await;
    ready().await?;
    tokio::task::spawn_blocking(wait_for_a_line).await?;
    for (worker, _) in &workers {
        worker.request_shutdown();
    }
    let ends = async {
        for (_, running) in workers {
            let _ = running.await;
        }
    };
    let _ = tokio::time::timeout(Duration::from_secs(10), ends).await;
    Ok(what_ran())
}

async fn latency(variant: &str, url: &str, samples: u64) -> Result<Value, Failure> {
    let worker = Arc::new(options(variant, url).init().await?);
    let utils = worker.create_utils();
    let running = start(&worker);
    tokio::time::sleep(SETTLING).await;
    ready().await?;
    for sample in 0..samples {
        utils.add_job(Timed { at: unix_seconds() }, JobSpec::default()).await?;
        STARTED.notified().await;
        tokio::time::sleep(pause(sample)).await;
    }
    worker.request_shutdown();
    let _ = tokio::time::timeout(Duration::from_secs(10), running).await;
    Ok(what_ran())
}

async fn start_stop(variant: &str, url: &str, samples: u64) -> Result<Value, Failure> {
    ready().await?;
    let mut seconds = Vec::new();
    for _ in 0..samples {
        let started = Instant::now();
        options(variant, url).init().await?.run_once().await?;
        seconds.push(started.elapsed().as_secs_f64());
    }
    Ok(json!({ "seconds": seconds }))
}

async fn adds(variant: &str, url: &str, jobs: u64) -> Result<Value, Failure> {
    let utils = options(variant, url).max_pg_conn(32).init().await?.create_utils();
    ready().await?;
    let next = Arc::new(AtomicU64::new(0));
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..32 {
        let (utils, next) = (utils.clone(), next.clone());
        clients.spawn(async move {
            while next.fetch_add(1, Ordering::Relaxed) < jobs {
                utils.add_raw_job(Trivial::IDENTIFIER, json!({}), JobSpec::default()).await?;
            }
            Ok::<(), Failure>(())
        });
    }
    while let Some(client) = clients.join_next().await {
        client??;
    }
    Ok(json!({ "jobs": jobs, "last": unix_seconds() }))
}

fn start(worker: &Arc<Worker>) -> tokio::task::JoinHandle<()> {
    let worker = worker.clone();
    tokio::spawn(async move {
        if let Err(error) = worker.run().await {
            eprintln!("the worker ended: {error}");
        }
    })
}

fn what_ran() -> Value {
    let order = ORDER.lock().expect("no panic");
    json!({
        "jobs": JOBS.load(Ordering::Relaxed),
        "last": f64::from_bits(LAST.load(Ordering::Relaxed)),
        "latencies": *LATENCIES.lock().expect("no panic"),
        "out_of_order": order.out_of_order,
        "at_once": order.at_once,
    })
}

fn ended() {
    JOBS.fetch_add(1, Ordering::Relaxed);
    LAST.store(unix_seconds().to_bits(), Ordering::Relaxed);
}

async fn ready() -> Result<(), Failure> {
    say("ready");
    tokio::task::spawn_blocking(wait_for_a_line).await?;
    Ok(())
}

fn wait_for_a_line() {
    let _ = std::io::stdin().lock().read_line(&mut String::new());
}

fn say(line: &str) {
    let mut stdout = std::io::stdout().lock();
    // Ignore the error: the controller is gone.
    let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
}

/// From 5 to 25 ms, the same sequence for every contestant.
fn pause(sample: u64) -> Duration {
    Duration::from_millis(5 + sample * 7919 % 21)
}

fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
