//! `why`, `workers` and `doctor` tell the truth about a real worker: one that is busy, killed or stopped, and rows that a
//! session has locked.

use crate::support::{
    Folder, Running, graphile_worker, installed_database, one_line, run_sql, texts, value, wait_until,
};
use graphile_worker_devdb::TestDatabase;
use serde_json::{Value, json};
use sqlx::{Connection, Executor, PgConnection};

/// A task that runs until its worker ends, and one that ends at once.
fn tasks() -> Folder {
    let folder = Folder::new();
    folder.script("tasks/slow", "#!/bin/sh\nexec sleep 600\n");
    folder.script("tasks/quick", "#!/bin/sh\n");
    folder
}

fn worker(database: &TestDatabase, folder: &Folder, arguments: &[&str]) -> Running {
    let mut command = folder.graphile_worker(arguments);
    command.args(["-c", database.url(), "--grace-period", "0"]);
    let mut worker = Running::start(command);
    worker.line(&["connected and waiting for jobs"]);
    worker
}

async fn add(database: &TestDatabase, arguments: &str) {
    run_sql(database, &format!("select graphile_worker.add_job({arguments})")).await;
}

async fn runs(database: &TestDatabase, id: i64) {
    let sql = format!("select locked_at is not null from graphile_worker._private_jobs where id = {id}");
    wait_until(database, &sql, json!(true)).await;
}

/// What a command prints, in one line.
fn said(database: &TestDatabase, arguments: &[&str]) -> String {
    let output = graphile_worker(arguments).args(["-c", database.url()]).output().unwrap();
    one_line(&texts(&output).0)
}

fn json_of(database: &TestDatabase, arguments: &[&str]) -> Value {
    let output = graphile_worker(arguments).args(["-c", database.url(), "--json"]).output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

/// As if the last heartbeat had been so long ago; for a worker that cannot send the next one.
async fn heartbeat_was(database: &TestDatabase, ago: &str) {
    let sql = format!("update graphile_worker._rs_workers set last_heartbeat_at = now() - interval '{ago}'");
    run_sql(database, &sql).await;
}

#[tokio::test]
async fn a_job_that_waits_for_a_slot() {
    let (database, folder) = (installed_database().await, tasks());
    let worker = worker(&database, &folder, &["-j", "1"]);
    add(&database, "'slow'").await;
    runs(&database, 1).await;
    add(&database, "'quick'").await;
    add(&database, "'quick'").await;
    let why = said(&database, &["why", "3"]);
    assert!(why.contains("All slots are busy: the workers that run its task have 1 slot"), "{why}");
    assert!(why.contains("One job comes before it") && why.ends_with("graphile-worker --jobs 1"), "{why}");
    let pid = worker.pid();
    let why = said(&database, &["why", "1"]);
    assert!(why.contains(&format!("(process {pid} on ")) && why.contains("has been running it for"), "{why}");
    // Host, process, release and slots are there for people and machines.
    let workers = json_of(&database, &["workers"]);
    let about = &workers[0];
    assert_eq!((&about["pid"], &about["slots"], &about["jobs"]), (&json!(pid), &json!(1), &json!(1)));
    assert!(about["host"].is_string() && about["version"] == env!("CARGO_PKG_VERSION"), "{workers}");
    let table = said(&database, &["workers"]);
    assert!(table.contains("1/1") && table.contains(&pid.to_string()), "{table}");
    let id = about["worker_id"].as_str().unwrap();
    assert!(table.contains(graphile_worker::short_worker_id(id)) && !table.contains(id), "{table}");
    let top = json_of(&database, &["top"]);
    assert_eq!((&top["workers"][0]["pid"], &top["workers"][0]["slots"]), (&json!(pid), &json!(1)));
}

#[tokio::test]
async fn a_job_whose_worker_was_killed() {
    let (database, folder) = (installed_database().await, tasks());
    let worker = worker(&database, &folder, &[]);
    let pid = worker.pid();
    add(&database, "'slow'").await;
    add(&database, "'slow', queue_name => 'q'").await;
    runs(&database, 1).await;
    worker.signal("KILL");
    worker.end();
    // At once: its connections are gone. Later: its heartbeat is late.
    let connections = "select count(*) from pg_stat_activity where datname = current_database()
                       and application_name like 'graphile\\_worker %'";
    wait_until(&database, connections, json!(0)).await;
    let why = said(&database, &["why", "1"]);
    assert!(why.contains("no connection has its name: it may have been killed"), "{why}");
    heartbeat_was(&database, "2 minutes").await;
    let why = said(&database, &["why", "1"]);
    assert!(why.contains("but has sent no heartbeat for 2m") && why.contains("(expected every 30s)"), "{why}");
    assert!(why.contains("No live worker can release its jobs"), "{why}");
    assert!(why.ends_with("release its jobs now: graphile-worker sweep --threshold 60s"), "{why}");
    let why = said(&database, &["why", "2"]);
    assert!(why.contains("No live worker runs its task: worker") && why.contains(&format!("process {pid}")));
    assert!(why.ends_with("start a worker: graphile-worker"), "{why}");
    // And so do the others.
    let doctor = said(&database, &["doctor"]);
    assert!(doctor.contains("0 alive, 0 dead, 0 unregistered, 1 silent"), "{doctor}");
    assert!(doctor.contains("has sent no heartbeat for 2m"), "{doctor}");
    assert!(said(&database, &["workers"]).contains("silent: no heartbeat for 2m"));
    // The command that it ends with frees the job.
    assert!(said(&database, &["sweep", "--threshold", "60s"]).contains("1 job released"));
    let lock = "select locked_at is null from graphile_worker._private_jobs where id = 1";
    assert_eq!(value(&database, lock).await, true);
}

#[tokio::test]
async fn a_job_whose_worker_was_stopped() {
    let (database, folder) = (installed_database().await, tasks());
    let worker = worker(&database, &folder, &[]);
    let pid = worker.pid();
    worker.signal("STOP");
    add(&database, "'quick'").await;
    heartbeat_was(&database, "2 minutes").await;
    let why = said(&database, &["why", "1"]);
    assert!(why.contains("has sent no heartbeat for 2m"), "{why}");
    assert!(why.contains(&format!("kill -CONT {pid}")), "{why}");
    worker.signal("CONT");
    wait_until(&database, "select count(*) from graphile_worker._private_jobs", json!(0)).await;
}

#[tokio::test]
async fn a_job_that_a_session_has_locked() {
    let (database, folder) = (installed_database().await, tasks());
    let options = database.options().application_name("a report");
    let mut session = PgConnection::connect_with(&options).await.unwrap();
    add(&database, "'quick'").await;
    add(&database, "'quick', queue_name => 'q'").await;
    for (lock, reason) in [
        ("select from graphile_worker._private_jobs where id = 1 for update", "Its row is locked by"),
        ("update graphile_worker._private_jobs set priority = 1 where id = 1", "Its row is locked by"),
        ("lock table graphile_worker._private_jobs in share mode", "The table _private_jobs is locked by"),
        ("lock table graphile_worker._private_jobs", "The table _private_jobs is locked by"),
    ] {
        session.execute("begin").await.unwrap();
        let pid: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut session).await.unwrap();
        session.execute(lock).await.unwrap();
        let why = said(&database, &["why", "1"]);
        assert!(
            why.contains(reason) && why.contains(&format!("(pid {pid}, application \"a report\"")),
            "{lock}: {why}"
        );
        assert!(why.contains("idle in transaction, open for"), "{why}");
        assert!(why.ends_with(&format!("select pg_terminate_backend({pid});")), "{why}");
        session.execute("rollback").await.unwrap();
    }
    session.execute("begin").await.unwrap();
    session.execute("select from graphile_worker._private_job_queues for update").await.unwrap();
    let why = said(&database, &["why", "2"]);
    assert!(why.contains("The row of its queue \"q\" is locked by an open transaction (pid"), "{why}");
    // It was true: the worker leaves the job alone until the session has ended.
    let _worker = worker(&database, &folder, &[]);
    wait_until(&database, "select array_agg(id) from graphile_worker._private_jobs", json!([2])).await;
    let why = said(&database, &["why", "2"]);
    assert!(why.contains("The row of its queue \"q\" is locked by"), "{why}");
    session.execute("rollback").await.unwrap();
    wait_until(&database, "select count(*) from graphile_worker._private_jobs", json!(0)).await;
}

/// Then the row does not name a transaction, but a list of them.
#[tokio::test]
async fn a_job_that_several_sessions_have_locked() {
    let database = installed_database().await;
    add(&database, "'quick', queue_name => 'q'").await;
    add(&database, "'quick'").await;
    run_sql(&database, "insert into graphile_worker._rs_workers (worker_id, tasks) values ('rs-live-1', '{quick}')")
        .await;
    let mut sessions = Vec::new();
    for name in ["a report", "another report"] {
        let options = database.options().application_name(name);
        let mut session = PgConnection::connect_with(&options).await.unwrap();
        let pid: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut session).await.unwrap();
        sessions.push((session, pid));
    }
    let in_both = async |sessions: &mut Vec<(PgConnection, i32)>, statement: &'static str| {
        for (session, _) in sessions {
            session.execute(statement).await.unwrap();
        }
    };
    for (lock, reason) in [
        ("select from graphile_worker._private_jobs where id = 1 for share", "Its row is locked by"),
        ("select from graphile_worker._private_job_queues for key share", "The row of its queue \"q\" is locked by"),
    ] {
        in_both(&mut sessions, "begin").await;
        in_both(&mut sessions, lock).await;
        let why = said(&database, &["why", "1"]);
        let pid = sessions[0].1;
        let holder = format!("{reason} an open transaction (pid {pid}, application \"a report\"");
        assert!(why.contains(&holder) && why.contains(") and 1 other: workers"), "{lock}: {why}");
        assert!(why.ends_with(&format!("select pg_terminate_backend({pid});")), "{why}");
        assert!(!said(&database, &["why", "2"]).contains("locked by"));
        // One is left.
        sessions[0].0.execute("rollback").await.unwrap();
        let why = said(&database, &["why", "1"]);
        assert!(why.contains(&format!("(pid {}, application \"another report\"", sessions[1].1)), "{lock}: {why}");
        assert!(!why.contains("other:"), "{why}");
        sessions[1].0.execute("rollback").await.unwrap();
        assert!(!said(&database, &["why", "1"]).contains("locked by"));
    }
}

#[tokio::test]
async fn a_job_whose_worker_does_not_register() {
    let (database, folder) = (installed_database().await, tasks());
    let _worker = worker(&database, &folder, &["--no-recovery"]);
    add(&database, "'slow'").await;
    runs(&database, 1).await;
    let how = "start it without `--no-recovery`, or in Rust with `WorkerOptions::worker_recovery`";
    let why = said(&database, &["why", "1"]);
    assert!(why.contains("does not register, so its host, process and slots are not known"), "{why}");
    assert!(why.contains(how), "{why}");
    let workers = said(&database, &["workers"]);
    assert!(workers.contains("alive, not registered"), "{workers}");
    assert!(workers.contains("their host, pid and slots are not known. To turn recovery on"), "{workers}");
}

#[tokio::test]
async fn the_last_error_stays_in_a_narrow_list() {
    let database = installed_database().await;
    add(&database, "'send_invoice', queue_name => 'invoices of march', job_key => 'invoice 4711'").await;
    run_sql(
        &database,
        "update graphile_worker._private_jobs set attempts = 3, last_error = 'SMTP: mailbox full',
           locked_at = now(), locked_by = 'rs-live-00112233445566778899aabb'",
    )
    .await;
    let output = graphile_worker(&["list", "-c", database.url()]).env("COLUMNS", "80").output().unwrap();
    let list = texts(&output).0;
    assert!(list.contains("last error") && list.contains("SMTP"), "{list}");
    assert!(list.lines().all(|line| line.chars().count() <= 80), "{list}");
    let wide = graphile_worker(&["list", "-c", database.url()]).output().unwrap();
    assert!(texts(&wide).0.contains(" 00112233 "), "{:?}", texts(&wide).0);
}
