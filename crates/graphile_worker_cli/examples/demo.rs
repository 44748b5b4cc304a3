//! What `make demo` shows: `graphile-worker dev` on the folder examples/demo, with a stream of jobs that succeed, fail,
//! are tried again, and wait for each other. It ends by itself; Ctrl-C ends it sooner.
//!
//! An argument says how many seconds it lasts (default 20).

use sqlx::{Connection, PgConnection};
use std::error::Error;
use std::io::{BufRead, BufReader, Lines};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// One after the other, again and again.
const STREAM: [&str; 7] = [
    r#"add_job('welcome', '{"name": "you", "email": "user@example.com"}')"#,
    r#"add_job('count', '{"text": "as many letters as there are"}')"#,
    r#"add_job('accounts/sync', queue_name := 'account:7')"#,
    r#"add_job('accounts/sync', queue_name := 'account:7')"#,
    r#"add_job('flaky')"#,
    r#"add_job('reports/daily', '{"name": "sales", "figures": [3, 4, 5]}', priority := 10)"#,
    r#"add_job('hopeless', max_attempts := 1)"#,
];

const PAUSE: Duration = Duration::from_millis(500);
/// At the end, so that what was added can run; a first retry comes after 2.7 seconds.
const QUIET: Duration = Duration::from_secs(4);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let seconds: u64 = std::env::args().nth(1).map_or(Ok(20), |seconds| seconds.parse())?;
    let folder = DemoFolder::choose()?;
    let (mut worker, url) = start_worker(&folder.path)?;
    let mut told = false;
    let fed = tokio::select! {
        fed = feed(&url, Duration::from_secs(seconds)) => fed,
        _ = tokio::signal::ctrl_c() => { told = true; Ok(()) }
    };
    // In a terminal, Ctrl-C has reached the worker as well.
    if !told {
        let _ = Command::new("kill").args(["-TERM", &worker.id().to_string()]).status();
    }
    let status = worker.wait()?;
    fed?;
    if !told && !status.success() {
        return Err(format!("the worker ended with {status}").into());
    }
    Ok(())
}

/// Adds jobs, and at the end tells what is left.
async fn feed(url: &str, lasts: Duration) -> Result<(), Box<dyn Error>> {
    let begin = Instant::now();
    let mut connection = PgConnection::connect(url).await?;
    for (turn, call) in (0..).zip(STREAM.iter().cycle()) {
        let at = begin + PAUSE * turn;
        if at > begin + lasts.saturating_sub(QUIET) {
            break;
        }
        sleep_until(at).await;
        println!("  > select graphile_worker.{call};");
        sqlx::raw_sql(sqlx::AssertSqlSafe(format!("select graphile_worker.{call}"))).execute(&mut connection).await?;
    }
    sleep_until(begin + lasts).await;
    let left: Vec<(String, i64, String)> = sqlx::query_as(
        "select task_identifier, count(*), coalesce(min(last_error), 'waits to be run')
         from graphile_worker.jobs group by 1 order by 1",
    )
    .fetch_all(&mut connection)
    .await?;
    println!("\nWhat is left in graphile_worker.jobs:");
    for (task, jobs, why) in left {
        println!("  {jobs} × {task}: {}", why.replace('\n', " "));
    }
    println!();
    Ok(())
}

/// Starts `dev` and reads the connection string that it prints; what it prints besides is passed on.
fn start_worker(folder: &Path) -> Result<(Child, String), Box<dyn Error>> {
    // target/debug/examples/demo stands below target/debug/graphile-worker.
    let examples = std::env::current_exe()?;
    let binary = examples.ancestors().nth(2).ok_or("this program is nowhere")?.join("graphile-worker");
    let mut worker = Command::new(&binary)
        .args(["dev", "--reset", "--jobs", "4"])
        .current_dir(folder)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{}: {error}: build it with `cargo build`", binary.display()))?;
    let mut lines = BufReader::new(worker.stdout.take().ok_or("no output")?).lines();
    let mut url = None;
    while let Some(line) = lines.next().transpose()? {
        println!("{line}");
        url = url.or_else(|| Some(line.trim().strip_prefix("DATABASE_URL=")?.to_owned()));
        if url.is_some() && line.contains("add_job(") {
            break;
        }
    }
    pass_on(lines);
    Ok((worker, url.ok_or("`graphile-worker dev` did not start")?))
}

fn pass_on(lines: Lines<BufReader<ChildStdout>>) {
    std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| println!("{line}")));
}

/// The folder examples/demo; a copy where it is somebody else's, or where PostgreSQL could not enter it, because we are root
/// and it must not be.
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
