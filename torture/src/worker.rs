//! A worker process: the public API of the library, with tasks that write down each of their runs.

use crate::Failure;
use crate::limits::{CAPPED, LINED, METERED};
use crate::record::{Begin, Journal, Line, MILLISECOND, Nanos, Outcome, journal_path, now};
use chrono::{DateTime, Utc};
use graphile_worker::{
    TaskError, TaskOptions, TaskOutcome, TestClock, WorkerContext, WorkerOptions, WorkerRecovered, WorkerStart,
};
use graphile_worker_scripts::{HostOptions, TasksDir};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(crate) const HEARTBEAT: Duration = Duration::from_millis(500);
pub(crate) const THRESHOLD: Duration = Duration::from_secs(4);
pub(crate) const SWEEP: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_secs(1);

/// The clock of the crontab runs this many times as fast as the real one: a tick every 5 seconds.
pub(crate) const CRON_SPEED: i64 = 12;

/// The tasks. A payload is [`Payload`], for `keyed` an array of event numbers.
pub(crate) const TASKS: [&str; 13] = [
    "plain", "queued", "slow", "failing", "fatal", "snoozing", "keyed", "operated", LIMITED, REPEATABLE, CAPPED,
    METERED, LINED,
];

/// The task whose jobs may run twice, so that a worker runs them before it writes their claims.
pub(crate) const REPEATABLE: &str = "repeatable";

/// The task of which a worker runs only [`LIMIT`] jobs at a time.
pub(crate) const LIMITED: &str = "limited";
pub(crate) const LIMIT: usize = 2;

/// The flag of some jobs. Some workers forbid it.
pub(crate) const FLAG: &str = "heavy";

/// The task in JavaScript. Only some workers run it.
pub(crate) const SCRIPTED: &str = "scripted";

/// How one worker process runs.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct WorkerArguments {
    #[arg(long, env = "TORTURE_URL")]
    url: String,
    /// Where the journal is written.
    #[arg(long)]
    folder: PathBuf,
    /// The number of this process; no other process of the run has it.
    #[arg(long)]
    process: u32,
    #[arg(long)]
    concurrency: usize,
    #[arg(long)]
    unprepared: bool,
    #[arg(long)]
    local_time: bool,
    /// Runs no jobs with [`FLAG`].
    #[arg(long)]
    forbids: bool,
    /// A folder of tasks in JavaScript.
    #[arg(long, requires = "node")]
    scripts: Option<PathBuf>,
    /// The Node that runs them.
    #[arg(long)]
    node: Option<PathBuf>,
    /// When the crontab's clock started, in milliseconds since 1970.
    #[arg(long)]
    cron_start: i64,
    /// The same as a time of the records: the clock of this process may be shifted.
    #[arg(long)]
    cron_started: Nanos,
}

/// What the payload of an ordinary job says.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Payload {
    /// How long the job takes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) work_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) queue: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seq: Option<u64>,
    /// How many attempts fail.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fail_first: Option<i16>,
    /// Snooze until this time of the records.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) snooze_until: Option<Nanos>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) flag: Option<String>,
}

/// What the crontab's clock shows: it starts a day in the past, so that no job of it lies in the future. It counts
/// monotonic time, so that it is the same in processes whose clocks are shifted.
pub(crate) fn cron_time(start: i64, started: Nanos) -> DateTime<Utc> {
    let begin = start - 24 * 3600 * 1000;
    let elapsed = i64::try_from((now() - started) / MILLISECOND).unwrap_or(0);
    DateTime::from_timestamp_millis(begin + elapsed * CRON_SPEED).unwrap_or_default()
}

/// How long after the start of the crontab's clock a tick fires.
pub(crate) fn fires_after(start: i64, tick: DateTime<Utc>) -> Duration {
    let begin = start - 24 * 3600 * 1000;
    Duration::from_millis(((tick.timestamp_millis() - begin) / CRON_SPEED).max(0).unsigned_abs())
}

/// Runs the worker until SIGTERM. Ends at once if the process that started it ends.
pub(crate) async fn run(arguments: WorkerArguments) -> Result<(), Failure> {
    end_with_parent()?;
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stderr).with_env_filter(filter).init();
    let journal = Arc::new(Journal::open(&journal_path(&arguments.folder, arguments.process))?);
    record_stalls(journal.clone());
    let (cron_start, cron_started) = (arguments.cron_start, arguments.cron_started);
    let clock = TestClock::at(cron_time(cron_start, cron_started));
    tokio::spawn({
        let clock = clock.clone();
        async move {
            loop {
                tokio::time::sleep(Duration::from_millis(100)).await;
                clock.set(cron_time(cron_start, cron_started));
            }
        }
    });
    let runs = Arc::new(AtomicU64::new(0));
    let mut told_to_stop = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    loop {
        let options = options(&arguments, &journal, &runs, &clock)?;
        let ended = tokio::select! {
            worker = options.init() => worker,
            _ = told_to_stop.recv() => return Ok(()),
        };
        // From here on the library listens to SIGTERM.
        let ended = match ended {
            Ok(worker) => worker.run().await,
            Err(error) => Err(error),
        };
        journal.write(&Line::Stopped { at: now(), error: ended.as_ref().err().map(ToString::to_string) });
        match ended {
            // The server may be away when a worker starts. The library reports that; trying again is up to the caller.
            // Once the worker has run a job, it must cope with outages by itself.
            Err(error) if runs.load(Ordering::Relaxed) == 0 && error.is_retryable() => {
                eprintln!("could not start, trying again: {error}");
                if tokio::time::timeout(Duration::from_millis(300), told_to_stop.recv()).await.is_ok() {
                    return Ok(());
                }
            }
            ended => return Ok(ended?),
        }
    }
}

fn options(
    arguments: &WorkerArguments,
    journal: &Arc<Journal>,
    runs: &Arc<AtomicU64>,
    clock: &TestClock,
) -> Result<WorkerOptions, Failure> {
    let (recovered, ready) = (journal.clone(), journal.clone());
    let mut options = WorkerOptions::default()
        .database_url(&arguments.url)
        .concurrency(arguments.concurrency)
        .poll_interval(POLL)
        .use_prepared_statements(!arguments.unprepared)
        .use_local_time(arguments.local_time)
        .heartbeat_interval(HEARTBEAT)
        .sweep_threshold(THRESHOLD)
        .sweep_interval(SWEEP)
        .recovery_delay(Duration::ZERO)
        .shutdown_grace_period(Duration::from_secs(2))
        .interrupted_job_retry_delay(Duration::from_millis(500))
        .cron_clock(clock)
        .with_crons(graphile_worker::parse_crontab("* * * * * cron ?id=tick")?)
        .task_options(LIMITED, TaskOptions::default().max_concurrent(LIMIT))
        .task_options(REPEATABLE, TaskOptions::default().repeatable(true))
        .on(WorkerStart, move |_| {
            ready.write(&Line::Ready { at: now(), clock: Utc::now().timestamp() });
            async {}
        })
        .on(WorkerRecovered, move |context| {
            recovered.write(&Line::DeclaredDead { at: now(), workers: context.worker_ids });
            async {}
        });
    if arguments.forbids {
        options = options.add_forbidden_flag(FLAG);
    }
    if let (Some(scripts), Some(node)) = (&arguments.scripts, &arguments.node) {
        options =
            options.task_source(TasksDir::new(scripts).host_options(HostOptions::default().node(node).max_hosts(1)));
    }
    for task in TASKS.into_iter().chain(["cron"]) {
        let (journal, runs) = (journal.clone(), runs.clone());
        options = options.define_task(task, move |payload: Value, ctx: WorkerContext| {
            let run = Run::begin(journal.clone(), runs.fetch_add(1, Ordering::Relaxed), &payload, &ctx);
            work(task, payload, ctx, run)
        });
    }
    Ok(options)
}

/// A run that is recorded: its beginning at once, its end when it returns or is dropped.
struct Run {
    journal: Arc<Journal>,
    number: u64,
    outcome: Outcome,
}

impl Run {
    fn begin(journal: Arc<Journal>, number: u64, payload: &Value, ctx: &WorkerContext) -> Run {
        let job = ctx.job();
        let ordinary: Payload = serde_json::from_value(payload.clone()).unwrap_or_default();
        journal.write(&Line::Begin(Begin {
            at: now(),
            run: number,
            worker: ctx.worker_id().to_owned(),
            host: None,
            task: job.task_identifier.to_string(),
            job: job.id,
            attempt: job.attempts,
            last_error: job.last_error.clone(),
            queue: ordinary.queue,
            queue_id: job.job_queue_id,
            seq: ordinary.seq,
            events: serde_json::from_value(payload.clone()).unwrap_or_default(),
            tick: payload["_cron"]["ts"].as_str().and_then(|tick| tick.parse().ok()),
            flag: ordinary.flag,
            claimed: job.locked_at.map(|claimed| claimed.timestamp_micros()),
        }));
        Run { journal, number, outcome: Outcome::Dropped }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.journal.write(&Line::End { at: now(), run: self.number, outcome: self.outcome });
    }
}

async fn work(task: &'static str, payload: Value, ctx: WorkerContext, mut run: Run) -> Result<TaskOutcome, TaskError> {
    let (id, attempt) = (ctx.job().id, ctx.job().attempts);
    let payload: Payload = serde_json::from_value(payload).unwrap_or_default();
    match payload.work_ms {
        Some(0) => {}
        Some(milliseconds) => tokio::time::sleep(Duration::from_millis(milliseconds)).await,
        None => tokio::time::sleep(Duration::from_millis(id.unsigned_abs() % 50)).await,
    }
    let (outcome, answer) = match task {
        "failing" | REPEATABLE | CAPPED | METERED if attempt <= payload.fail_first.unwrap_or(0) => {
            let wait = Duration::from_millis(50 * id.unsigned_abs() % 400);
            (Outcome::Failed, Err(TaskError::retry_after(wait, "this attempt is meant to fail")))
        }
        "fatal" => (Outcome::FailedForGood, Err(TaskError::permanent("this job is meant to fail"))),
        "snoozing" => match payload.snooze_until.unwrap_or(0).saturating_sub(now()) / MILLISECOND {
            0 => (Outcome::Ok, Ok(TaskOutcome::Done)),
            left => (Outcome::Snoozed, Ok(TaskOutcome::Snooze(Duration::from_millis(left.min(700))))),
        },
        _ => (Outcome::Ok, Ok(TaskOutcome::Done)),
    };
    run.outcome = outcome;
    answer
}

/// No worker outlives the process that started it. The kernel's signal also ends a worker that is suspended; standard
/// input is closed even if the parent was gone before the signal was set.
fn end_with_parent() -> Result<(), Failure> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(3);
    });
    Ok(())
}

/// A thread that sleeps for 100 ms and wakes up much later shows that the process did not get any CPU.
fn record_stalls(journal: Arc<Journal>) {
    std::thread::spawn(move || {
        let mut last = now();
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let at = now();
            if at - last > 600 * MILLISECOND {
                journal.write(&Line::Stalled { from: last, to: at });
            }
            last = at;
        }
    });
}
