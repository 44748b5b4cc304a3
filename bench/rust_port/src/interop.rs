//! The `graphile_worker` of crates.io as a program, for `interop/tests/rust_port.rs`.
//!
//! ```text
//! rust_port install URL         installs its schema
//! rust_port add URL             reads jobs from stdin, a JSON object per line, and adds them through its API
//! rust_port run URL             runs jobs until stdin ends
//! rust_port recover URL         the same with recovery on
//! ```
//!
//! It writes one line to stdout per event: `ready` before it runs jobs, `began N` and `ended N` for each of them. The task
//! `note` ends at once, the task `hold` when it reads the line `go`.

use graphile_worker::{
    IntoTaskHandlerResult, JobKeyMode, JobSpec, TaskHandler, WorkerContext, WorkerOptions, WorkerRecoveryConfig,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::{BufRead, Write};
use std::sync::{Arc, LazyLock};
use tokio::sync::Semaphore;

type Failure = Box<dyn std::error::Error + Send + Sync>;

static GO: LazyLock<Semaphore> = LazyLock::new(|| Semaphore::new(0));

#[derive(Serialize, Deserialize)]
struct Note {
    n: i64,
}

impl TaskHandler for Note {
    const IDENTIFIER: &'static str = "note";

    async fn run(self, _ctx: WorkerContext) -> impl IntoTaskHandlerResult {
        say(&format!("began {}", self.n));
        say(&format!("ended {}", self.n));
    }
}

#[derive(Serialize, Deserialize)]
struct Hold {
    n: i64,
}

impl TaskHandler for Hold {
    const IDENTIFIER: &'static str = "hold";

    async fn run(self, _ctx: WorkerContext) -> impl IntoTaskHandlerResult {
        say(&format!("began {}", self.n));
        if let Ok(permit) = GO.acquire().await {
            permit.forget();
        }
        say(&format!("ended {}", self.n));
    }
}

/// A job as the test describes it.
#[derive(Deserialize)]
struct Described {
    task: String,
    payload: Value,
    queue: Option<String>,
    key: Option<String>,
    priority: Option<i16>,
    max_attempts: Option<i16>,
    flags: Option<Vec<String>>,
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [command, url] = &arguments[..] else {
        return Err("expected COMMAND URL".into());
    };
    let options = WorkerOptions::default()
        .database_url(url)
        .concurrency(4)
        .listen_os_shutdown_signals(false)
        .define_job::<Note>()
        .define_job::<Hold>();
    match command.as_str() {
        "install" => drop(options.init().await?),
        "add" => add(options).await?,
        "run" => run(options).await?,
        "recover" => run(options.worker_recovery(WorkerRecoveryConfig::default().enabled(true))).await?,
        unknown => return Err(format!("the command is {unknown:?}, expected install, add, run or recover").into()),
    }
    Ok(())
}

async fn add(options: WorkerOptions) -> Result<(), Failure> {
    let utils = options.init().await?.create_utils();
    for line in std::io::stdin().lock().lines() {
        let job: Described = serde_json::from_str(&line?)?;
        let spec = JobSpec {
            queue_name: job.queue,
            job_key_mode: job.key.is_some().then_some(JobKeyMode::Replace),
            job_key: job.key,
            priority: job.priority,
            max_attempts: job.max_attempts,
            flags: job.flags,
            ..JobSpec::default()
        };
        utils.add_raw_job(&job.task, job.payload, spec).await?;
    }
    Ok(())
}

async fn run(options: WorkerOptions) -> Result<(), Failure> {
    let worker = Arc::new(options.init().await?);
    let stopped = worker.clone();
    std::thread::spawn(move || {
        for _ in std::io::stdin().lock().lines().map_while(Result::ok) {
            GO.add_permits(1);
        }
        stopped.request_shutdown();
    });
    say("ready");
    worker.run().await?;
    Ok(())
}

fn say(line: &str) {
    let mut stdout = std::io::stdout().lock();
    // A test that has ended reads nothing.
    let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
}
