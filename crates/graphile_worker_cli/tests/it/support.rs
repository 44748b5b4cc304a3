//! Helpers that all tests share: databases, temporary folders, and running the binary. Helpers for one topic are in the
//! file of that topic.

use graphile_worker_devdb::{Cluster, PgBouncer, TestDatabase};
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

/// How long a test waits for an event before it fails.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(180);

/// Creates an empty database.
pub(crate) async fn empty_database() -> TestDatabase {
    CLUSTER.database("empty", async |_| Ok(())).await.unwrap()
}

/// Creates a database with this release's schema installed.
pub(crate) async fn installed_database() -> TestDatabase {
    let database = empty_database().await;
    let mut connection = PgConnection::connect_with(&database.options()).await.unwrap();
    graphile_worker::migrate(&mut connection, "graphile_worker").await.unwrap();
    database
}

/// Starts a PgBouncer in front of the server, with these settings instead of its defaults.
pub(crate) fn pgbouncer(settings: &[(&str, &str)]) -> PgBouncer {
    CLUSTER.pgbouncer(settings).unwrap_or_else(|error| panic!("no PgBouncer for the tests: {error}"))
}

pub(crate) async fn run_sql(database: &TestDatabase, sql: &str) {
    let mut connection = PgConnection::connect_with(&database.options()).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
}

/// Runs a query and returns its single value as JSON.
pub(crate) async fn value(database: &TestDatabase, sql: &str) -> Value {
    let mut connection = PgConnection::connect_with(&database.options()).await.unwrap();
    let sql = format!("select to_json(answer) from ({sql}) as query (answer)");
    sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut connection).await.unwrap()
}

/// Repeats the query until it returns `wanted`.
pub(crate) async fn wait_until(database: &TestDatabase, sql: &str, wanted: Value) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let found = value(database, sql).await;
        if found == wanted {
            return;
        }
        assert!(Instant::now() < deadline, "{sql} is {found}, expected {wanted}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) async fn wait_for_file(path: &Path) {
    let deadline = Instant::now() + TIMEOUT;
    while !path.exists() {
        assert!(Instant::now() < deadline, "{} does not appear", path.display());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Host and port of the database's server.
pub(crate) fn server(database: &TestDatabase) -> String {
    database.url().rsplit_once('@').unwrap().1.split('/').next().unwrap().to_owned()
}

/// A temporary folder that every user can enter, because PostgreSQL may run as another user. Deleted on drop.
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

    /// Writes an executable file.
    pub(crate) fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.write(name, text);
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        path
    }

    /// The binary, with this folder as its current folder.
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

/// The binary, without the environment variables that it reads.
pub(crate) fn graphile_worker(arguments: &[&str]) -> Command {
    clean(Command::new(env!("CARGO_BIN_EXE_graphile-worker")), arguments)
}

/// A program in examples/, which is built with the tests.
pub(crate) fn example(name: &str, arguments: &[&str]) -> Command {
    let folder = Path::new(env!("CARGO_BIN_EXE_graphile-worker")).parent().unwrap().join("examples");
    clean(Command::new(folder.join(name)), arguments)
}

/// The command with these arguments, and without the environment variables that the binary reads.
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

/// Runs the command, and returns its exit code and the single line that it printed.
pub(crate) fn outcome(mut command: Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    let (stdout, stderr) = texts(&output);
    let line = if output.status.success() { stdout.clone() } else { stderr.clone() };
    assert_eq!((stdout.clone() + &stderr).lines().count(), 1, "one line: {stdout}{stderr}");
    (output.status.code(), line.trim_end().to_owned())
}

/// Runs the binary, which must fail with a single line that contains no password.
pub(crate) fn failure(arguments: &[&str]) -> (i32, String) {
    failure_of(graphile_worker(arguments))
}

pub(crate) fn failure_of(command: Command) -> (i32, String) {
    let (code, line) = outcome(command);
    assert!(!line.contains("secret"), "the message contains the password: {line}");
    (code.unwrap(), line)
}

/// Standard output and standard error as text.
pub(crate) fn texts(output: &Output) -> (String, String) {
    (String::from_utf8(output.stdout.clone()).unwrap(), String::from_utf8(output.stderr.clone()).unwrap())
}

/// The text with single spaces instead of line breaks.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A running process, and the lines that it has printed.
pub(crate) struct Running {
    child: Child,
    lines: Receiver<String>,
    /// The lines that `line` has returned, then the others.
    seen: Vec<String>,
    returned: usize,
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
        Running { child, lines, seen: Vec::new(), returned: 0 }
    }

    /// Waits for a line that contains all of `parts`, other than those returned before.
    pub(crate) fn line(&mut self, parts: &[&str]) -> String {
        let deadline = Instant::now() + TIMEOUT;
        let fits = |line: &str| parts.iter().all(|part| line.contains(part));
        loop {
            if let Some(position) = self.seen.iter().skip(self.returned).position(|line| fits(line)) {
                // Lines of standard output and standard error may arrive in any order: keep the earlier ones.
                let line = self.seen.remove(self.returned + position);
                self.seen.insert(self.returned, line.clone());
                self.returned += 1;
                return line;
            }
            let left = deadline.saturating_duration_since(Instant::now());
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

    /// Waits for the process to exit, and returns its exit code and everything that it printed.
    pub(crate) fn end(mut self) -> (Option<i32>, String) {
        let deadline = Instant::now() + TIMEOUT;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "the process does not exit:\n{}", self.seen.join("\n"));
            std::thread::sleep(Duration::from_millis(10));
        };
        while let Ok(line) = self.lines.recv_timeout(Duration::from_secs(20)) {
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
