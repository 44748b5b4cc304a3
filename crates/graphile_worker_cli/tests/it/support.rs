//! What every test needs: a database, a folder, the binary, and what came of running it.

use graphile_worker_devdb::{Cluster, TestDatabase};
use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

static CLUSTER: LazyLock<Cluster> =
    LazyLock::new(|| Cluster::for_tests().unwrap_or_else(|error| panic!("no PostgreSQL for the tests: {error}")));

/// So long a test waits for something that ought to happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A database with nothing in it.
pub(crate) async fn empty_database() -> TestDatabase {
    CLUSTER.database("empty", async |_| Ok(())).await.unwrap()
}

/// A database with the schema installed, by a release like this one.
pub(crate) async fn installed_database() -> TestDatabase {
    let database = empty_database().await;
    let mut connection = PgConnection::connect_with(&database.options()).await.unwrap();
    graphile_worker::migrate(&mut connection, "graphile_worker").await.unwrap();
    database
}

pub(crate) async fn run_sql(database: &TestDatabase, sql: &str) {
    let mut connection = PgConnection::connect_with(&database.options()).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
}

/// The only value of a query, as JSON.
pub(crate) async fn value(database: &TestDatabase, sql: &str) -> Value {
    let mut connection = PgConnection::connect_with(&database.options()).await.unwrap();
    let sql = format!("select to_json(answer) from ({sql}) as asked (answer)");
    sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut connection).await.unwrap()
}

/// Waits until the query's only value is this.
pub(crate) async fn wait_until(database: &TestDatabase, sql: &str, wanted: Value) {
    let patience = Instant::now() + PATIENCE;
    loop {
        let found = value(database, sql).await;
        if found == wanted {
            return;
        }
        assert!(Instant::now() < patience, "{sql} is {found}, expected {wanted}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Host and port.
pub(crate) fn server(database: &TestDatabase) -> String {
    database.url().rsplit_once('@').unwrap().1.split('/').next().unwrap().to_owned()
}

/// A folder that is gone after its test, for everybody to enter.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Folder {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("gw-cli-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().canonicalize().unwrap().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).unwrap();
        Folder(folder)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    }

    /// An executable.
    pub(crate) fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.write(name, text);
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        path
    }

    /// The binary, in this folder.
    pub(crate) fn graphile_worker(&self, arguments: &[&str]) -> Command {
        let mut command = graphile_worker(arguments);
        command.current_dir(&self.0);
        command
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The binary, with nothing in its environment that it would go by.
pub(crate) fn graphile_worker(arguments: &[&str]) -> Command {
    clean(Command::new(env!("CARGO_BIN_EXE_graphile-worker")), arguments)
}

/// A program of examples/, built with the tests.
pub(crate) fn example(name: &str, arguments: &[&str]) -> Command {
    let folder = Path::new(env!("CARGO_BIN_EXE_graphile-worker")).parent().unwrap().join("examples");
    clean(Command::new(folder.join(name)), arguments)
}

pub(crate) fn clean(mut command: Command, arguments: &[&str]) -> Command {
    command.args(arguments);
    for (name, _) in std::env::vars_os() {
        let named = name.to_string_lossy();
        if ["PG", "DATABASE_URL", "RUST_LOG", "GRAPHILE_"].iter().any(|ours| named.starts_with(ours))
            && named != "PGBIN"
        {
            command.env_remove(&name);
        }
    }
    command
}

/// The only line that was written, to standard output or standard error, and the exit code.
pub(crate) fn outcome(mut command: Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    let (stdout, stderr) = texts(&output);
    let line = if output.status.success() { stdout.clone() } else { stderr.clone() };
    assert_eq!((stdout.clone() + &stderr).lines().count(), 1, "one line: {stdout}{stderr}");
    (output.status.code(), line.trim_end().to_owned())
}

/// The same for what is meant to fail.
pub(crate) fn failure(arguments: &[&str]) -> (i32, String) {
    failure_of(graphile_worker(arguments))
}

pub(crate) fn failure_of(command: Command) -> (i32, String) {
    let (code, line) = outcome(command);
    assert!(!line.contains("secret"), "the password is nobody's business: {line}");
    (code.unwrap(), line)
}

/// Standard output and standard error.
pub(crate) fn texts(output: &Output) -> (String, String) {
    (String::from_utf8(output.stdout.clone()).unwrap(), String::from_utf8(output.stderr.clone()).unwrap())
}

/// Without the line breaks of a terminal.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The binary at work, with what it writes.
pub(crate) struct Running {
    child: Child,
    lines: Receiver<String>,
    /// What was asked for, then the others.
    seen: Vec<String>,
    asked: usize,
}

impl Running {
    pub(crate) fn start(mut command: Command) -> Running {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = channel();
        let streams: [Box<dyn Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        for stream in streams {
            let sender = sender.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    let _ = sender.send(line);
                }
            });
        }
        Running { child, lines, seen: Vec::new(), asked: 0 }
    }

    /// A line that has all of this in it, other than those that were asked for before.
    pub(crate) fn line(&mut self, parts: &[&str]) -> String {
        let patience = Instant::now() + PATIENCE;
        let fits = |line: &str| parts.iter().all(|part| line.contains(part));
        loop {
            if let Some(position) = self.seen.iter().skip(self.asked).position(|line| fits(line)) {
                // Standard output and standard error may overtake each other: what stands before is kept.
                let line = self.seen.remove(self.asked + position);
                self.seen.insert(self.asked, line.clone());
                self.asked += 1;
                return line;
            }
            let left = patience.saturating_duration_since(Instant::now());
            let Ok(line) = self.lines.recv_timeout(left) else {
                panic!("no line with {parts:?} in:\n{}", self.seen.join("\n"));
            };
            self.seen.push(line);
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill").arg(format!("-{name}")).arg(self.pid().to_string()).status().unwrap();
        assert!(status.success());
    }

    /// The exit code, and everything it has written.
    pub(crate) fn end(mut self) -> (Option<i32>, String) {
        let patience = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < patience, "it does not end:\n{}", self.seen.join("\n"));
            std::thread::sleep(Duration::from_millis(10));
        };
        while let Ok(line) = self.lines.recv_timeout(Duration::from_secs(5)) {
            self.seen.push(line);
        }
        (status.code(), self.seen.join("\n"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
