//! `make demo`: runs `graphile-worker dev` on the folder examples/demo, and adds jobs that succeed, fail, are retried,
//! and wait for each other. It stops by itself, or on Ctrl-C.
//!
//! The argument is its duration in seconds (default 20).

use sqlx::{Connection, PgConnection};
use std::error::Error;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep_until};

/// The jobs to add, in a cycle.
const JOBS: [&str; 7] = [
    r#"add_job('welcome', '{"name": "you", "email": "user@example.com"}')"#,
    r#"add_job('count', '{"text": "as many letters as there are"}')"#,
    r#"add_job('accounts/sync', queue_name := 'account:7')"#,
    r#"add_job('accounts/sync', queue_name := 'account:7')"#,
    r#"add_job('flaky')"#,
    r#"add_job('reports/daily', '{"name": "sales", "figures": [3, 4, 5]}', priority := 10)"#,
    r#"add_job('hopeless', max_attempts := 1)"#,
];

/// Time between two jobs.
const PAUSE: Duration = Duration::from_millis(500);
/// Time at the end without new jobs, so that the last ones can run. A first retry comes after 2.7 seconds.
const QUIET: Duration = Duration::from_secs(4);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let seconds: u64 = std::env::args().nth(1).map_or(Ok(20), |seconds| seconds.parse())?;
    let mut signals = Signals::listen()?;
    let folder = DemoFolder::choose()?;
    let mut worker = Worker::start(&folder.path)?;
    let shown = tokio::select! {
        shown = show(&mut worker, Duration::from_secs(seconds)) => shown,
        () = signals.next() => Ok(()),
    };
    let status = worker.end()?;
    match shown {
        // The reader has closed the pipe: `make demo | head`.
        Err(error) if is_broken_pipe(error.as_ref()) => Ok(()),
        // A signal during its start also makes `dev` fail.
        Ok(()) if !status.success() && status.code() != Some(128 + TERMINATE) => {
            Err(format!("the worker exited with {status}").into())
        }
        shown => shown,
    }
}

async fn show(worker: &mut Worker, duration: Duration) -> Result<(), Box<dyn Error>> {
    let url = worker.database_url().await?;
    add_jobs(&url, duration).await
}

/// Adds jobs, and at the end prints those that are left.
async fn add_jobs(url: &str, duration: Duration) -> Result<(), Box<dyn Error>> {
    let begin = Instant::now();
    let mut connection = PgConnection::connect(url).await?;
    for (turn, call) in (0..).zip(JOBS.iter().cycle()) {
        let at = begin + PAUSE * turn;
        if at > begin + duration.saturating_sub(QUIET) {
            break;
        }
        sleep_until(at).await;
        print_line(&format!("  > select graphile_worker.{call};"))?;
        sqlx::raw_sql(sqlx::AssertSqlSafe(format!("select graphile_worker.{call}"))).execute(&mut connection).await?;
    }
    sleep_until(begin + duration).await;
    let left: Vec<(String, i64, String)> = sqlx::query_as(
        "select task_identifier, count(*), coalesce(min(last_error), 'waiting')
         from graphile_worker.jobs group by 1 order by 1",
    )
    .fetch_all(&mut connection)
    .await?;
    print_line("\nLeft in graphile_worker.jobs:")?;
    for (task, jobs, why) in left {
        print_line(&format!("  {jobs} × {task}: {}", why.replace('\n', " ")))?;
    }
    print_line("")?;
    Ok(())
}

/// Prints a line. `println!` would panic if the reader has closed the pipe.
fn print_line(line: &str) -> io::Result<()> {
    writeln!(io::stdout(), "{line}")
}

fn is_broken_pipe(error: &(dyn Error + 'static)) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// A running `graphile-worker dev`. On drop, it gets SIGTERM and is waited for, so that its PostgreSQL stops too.
struct Worker {
    process: Child,
    lines: UnboundedReceiver<String>,
    has_ended: bool,
}

impl Worker {
    fn start(folder: &Path) -> Result<Worker, Box<dyn Error>> {
        // This program is target/debug/examples/demo; the binary is target/debug/graphile-worker.
        let examples = std::env::current_exe()?;
        let binary =
            examples.ancestors().nth(2).ok_or("could not find the folder of this program")?.join("graphile-worker");
        let mut process = Command::new(&binary)
            .args(["dev", "--reset", "--jobs", "4"])
            .current_dir(folder)
            .stdout(Stdio::piped())
            // Ctrl-C must not reach the worker directly: with our SIGTERM, it would get two signals and interrupt its
            // jobs.
            .process_group(0)
            .spawn()
            .map_err(|error| format!("{}: {error}: build it with `cargo build`", binary.display()))?;
        let (sender, lines) = unbounded_channel();
        if let Some(stdout) = process.stdout.take() {
            std::thread::spawn(move || forward_output(stdout, &sender));
        }
        Ok(Worker { process, lines, has_ended: false })
    }

    /// Waits until `dev` has printed its greeting, and returns the connection string in it.
    async fn database_url(&mut self) -> Result<String, Box<dyn Error>> {
        let mut url = None;
        while let Some(line) = self.lines.recv().await {
            url = url.or_else(|| Some(line.trim().strip_prefix("export DATABASE_URL=")?.trim_matches('\'').to_owned()));
            if line.contains("add_job(")
                && let Some(url) = url.take()
            {
                return Ok(url);
            }
        }
        Err("`graphile-worker dev` did not start".into())
    }

    fn end(mut self) -> io::Result<ExitStatus> {
        self.terminate_and_wait()
    }

    fn terminate_and_wait(&mut self) -> io::Result<ExitStatus> {
        self.has_ended = true;
        let _ = Command::new("kill").args(["-TERM", &self.process.id().to_string()]).stderr(Stdio::null()).status();
        self.process.wait()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if !self.has_ended {
            let _ = self.terminate_and_wait();
        }
    }
}

/// Prints every line, and keeps reading if our own reader is gone, so that the worker is never blocked.
fn forward_output(stdout: ChildStdout, to: &UnboundedSender<String>) {
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        let _ = print_line(&line);
        let _ = to.send(line);
    }
}

const TERMINATE: i32 = 15;

/// The signals that stop the demo.
struct Signals([Signal; 3]);

impl Signals {
    fn listen() -> io::Result<Signals> {
        let [interrupt, terminate, hang_up] =
            [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
        Ok(Signals([interrupt?, terminate?, hang_up?]))
    }

    async fn next(&mut self) {
        let [interrupt, terminate, hang_up] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hang_up.recv() => {}
        }
    }
}

/// The folder examples/demo, or a copy of it if another user owns it, or if we are root and PostgreSQL, which must not
/// run as root, could not enter it.
struct DemoFolder {
    path: PathBuf,
    is_copy: bool,
}

impl DemoFolder {
    fn choose() -> Result<DemoFolder, Box<dyn Error>> {
        let original = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/demo").canonicalize()?;
        let user: u32 = String::from_utf8(Command::new("id").arg("-u").output()?.stdout)?.trim().parse()?;
        let is_ours = std::fs::metadata(&original)?.uid() == user;
        let is_open = |folder: &Path| std::fs::metadata(folder).is_ok_and(|found| found.mode() & 0o001 != 0);
        if is_ours && (user != 0 || original.ancestors().all(is_open)) {
            return Ok(DemoFolder { path: original, is_copy: false });
        }
        let copy = std::env::temp_dir().join(format!("graphile-worker-demo-{}", std::process::id()));
        std::fs::create_dir(&copy)?;
        for part in ["tasks", "crontab"] {
            let copied = Command::new("cp").arg("-R").arg(original.join(part)).arg(&copy).status()?;
            if !copied.success() {
                return Err(format!("could not copy {} to {}", original.display(), copy.display()).into());
            }
        }
        Ok(DemoFolder { path: copy, is_copy: true })
    }
}

impl Drop for DemoFolder {
    fn drop(&mut self) {
        if self.is_copy {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
