//! What every test needs: a database, the binary, and what came of running it.

use graphile_worker_devdb::{Cluster, TestDatabase};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::process::Command;
use std::sync::LazyLock;

static CLUSTER: LazyLock<Cluster> =
    LazyLock::new(|| Cluster::for_tests().unwrap_or_else(|error| panic!("no PostgreSQL for the tests: {error}")));

/// A database with nothing in it.
pub(crate) async fn empty_database() -> TestDatabase {
    CLUSTER.database("empty", async |_| Ok(())).await.unwrap()
}

pub(crate) async fn run_sql(database: &TestDatabase, sql: &str) {
    let mut connection = PgConnection::connect_with(&database.options()).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
}

/// Host and port.
pub(crate) fn server(database: &TestDatabase) -> String {
    database.url().rsplit_once('@').unwrap().1.split('/').next().unwrap().to_owned()
}

/// The binary, with nothing in its environment that it would go by.
pub(crate) fn graphile_worker(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_graphile-worker"));
    command.args(arguments);
    for (name, _) in std::env::vars_os() {
        let named = name.to_string_lossy();
        if ["PG", "DATABASE_URL", "RUST_LOG", "GRAPHILE_WORKER_"].iter().any(|ours| named.starts_with(ours))
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
    let (stdout, stderr) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    let line = if output.status.success() { stdout.clone() } else { stderr.clone() };
    assert_eq!((stdout.clone() + &stderr).lines().count(), 1, "one line: {stdout}{stderr}");
    (output.status.code(), line.trim_end().to_owned())
}

/// The same for what is meant to fail.
pub(crate) fn failure(arguments: &[&str]) -> (i32, String) {
    let (code, line) = outcome(graphile_worker(arguments));
    assert!(!line.contains("secret"), "the password is nobody's business: {line}");
    (code.unwrap(), line)
}
