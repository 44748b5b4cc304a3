//! `graphile-worker` without a command: every option, and how it ends.

use crate::support::{
    Folder, Running, empty_database, graphile_worker, installed_database, outcome, run_sql, texts, value, wait_until,
};
use graphile_worker_devdb::TestDatabase;
use serde_json::{Value, json};
use sqlx::Connection;
use std::process::Command;

const JOBS_LEFT: &str = "select count(*) from graphile_worker.jobs";

/// A folder with the task `greet`, which tells what it was given.
fn greeting_folder() -> Folder {
    let folder = Folder::new();
    folder.script("tasks/greet", "#!/bin/sh\ncat\n");
    folder
}

/// The binary on this database, whose password is not on its command line.
fn on(database: &TestDatabase, folder: &Folder, arguments: &[&str]) -> Command {
    let mut command = folder.graphile_worker(arguments);
    command.env("DATABASE_URL", database.url());
    command
}

fn add_job(task: &str) -> String {
    format!("select graphile_worker.add_job('{task}', '{{\"name\": \"world\"}}')")
}

#[tokio::test]
async fn run_installs_the_schema_runs_new_jobs_and_stops_on_a_signal() {
    let (database, folder) = (empty_database().await, greeting_folder());
    let mut worker = Running::start(on(&database, &folder, &[]));
    worker.line(&["[core] INFO: schema installed (level: 20, schema: graphile_worker)"]);
    worker.line(&["[worker ", "INFO: connected and waiting for jobs", "greet"]);
    run_sql(&database, &add_job("greet")).await;
    worker.line(&["[job 1 greet] INFO: {\"payload\":{\"name\": \"world\"}}"]);
    worker.line(&["[job 1 greet] INFO: job completed (", "ms)"]);
    worker.signal("TERM");
    worker.line(&["INFO: shutdown requested (signal: SIGTERM)"]);
    assert_eq!(worker.end().0, Some(0));
    assert_eq!(value(&database, JOBS_LEFT).await, 0);
}

#[tokio::test]
async fn once_runs_due_jobs_and_exits() {
    let (database, folder) = (installed_database().await, greeting_folder());
    run_sql(&database, &add_job("greet")).await;
    run_sql(&database, "select graphile_worker.add_job('greet', run_at := now() + interval '1 hour')").await;
    let output = on(&database, &folder, &["--once"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", texts(&output).1);
    assert_eq!(value(&database, JOBS_LEFT).await, 1);
}

#[tokio::test]
async fn one_job_at_a_time_is_the_default_and_jobs_makes_it_more() {
    let (database, folder) = (installed_database().await, Folder::new());
    // Fails where another one runs.
    folder.script("tasks/alone", "#!/bin/sh\nmkdir running || exit 1\nsleep 0.1\nrmdir running\n");
    // Ends where another one runs.
    folder.script(
        "tasks/together",
        "#!/bin/sh\ntouch \"here.$GRAPHILE_WORKER_JOB_ID\"\nuntil [ \"$(ls here.* | wc -l)\" = 2 ]; do sleep 0.01; done\n",
    );
    for _ in 0..3 {
        run_sql(&database, &add_job("alone")).await;
    }
    let alone = on(&database, &folder, &["--once"]).output().unwrap();
    assert_eq!(value(&database, JOBS_LEFT).await, 0, "{}", texts(&alone).1);
    for (how, task) in [(&["--once", "-j", "2"][..], "together"), (&["--once", "--jobs=2"], "together")] {
        run_sql(&database, &format!("{}; {}", add_job(task), add_job(task))).await;
        let together = on(&database, &folder, how).output().unwrap();
        assert_eq!(value(&database, JOBS_LEFT).await, 0, "{}", texts(&together).1);
        for file in std::fs::read_dir(folder.path()).unwrap().flatten() {
            if file.file_name().to_string_lossy().starts_with("here.") {
                std::fs::remove_file(file.path()).unwrap();
            }
        }
    }
}

#[tokio::test]
async fn polling_finds_jobs_without_notifications_and_prepared_statements() {
    let (database, folder) = (installed_database().await, greeting_folder());
    let mut worker = Running::start(on(
        &database,
        &folder,
        &["--poll-interval", "50", "--no-prepared-statements", "--max-pool-size", "2"],
    ));
    worker.line(&["connected and waiting for jobs"]);
    // Not by `add_job`, which would tell.
    run_sql(
        &database,
        "insert into graphile_worker._private_tasks (identifier) values ('greet') on conflict do nothing;
         insert into graphile_worker._private_jobs (task_id) select id from graphile_worker._private_tasks",
    )
    .await;
    worker.line(&["job completed"]);
    worker.signal("INT");
    assert_eq!(worker.end().0, Some(0));
}

#[tokio::test]
async fn running_jobs_may_finish_within_the_grace_period() {
    let (database, folder) = (installed_database().await, Folder::new());
    folder.script("tasks/slow", "#!/bin/sh\necho begun\nuntil [ -e go ]; do sleep 0.01; done\n");
    run_sql(&database, &add_job("slow")).await;
    let mut worker = Running::start(on(&database, &folder, &["--grace-period", "60"]));
    worker.line(&["INFO: begun"]);
    worker.signal("TERM");
    worker.line(&["waiting for running jobs to finish"]);
    folder.write("go", "");
    worker.line(&["job completed"]);
    assert_eq!(worker.end().0, Some(0));
    assert_eq!(value(&database, JOBS_LEFT).await, 0);
}

#[tokio::test]
async fn jobs_that_outlive_the_grace_period_are_released() {
    let (database, folder) = (installed_database().await, Folder::new());
    folder.script("tasks/endless", "#!/bin/sh\necho begun\nexec sleep 1000\n");
    run_sql(&database, &add_job("endless")).await;
    let mut worker = Running::start(on(&database, &folder, &["--grace-period", "0"]));
    worker.line(&["INFO: begun"]);
    worker.signal("TERM");
    let (code, log) = worker.end();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("job interrupted and released"), "{log}");
    wait_until(&database, "select attempts || ' ' || (locked_by is null) from graphile_worker.jobs", json!("0 true"))
        .await;
}

#[tokio::test]
async fn a_second_signal_ends_it_at_once_with_the_code_of_a_shell() {
    let (database, folder) = (installed_database().await, Folder::new());
    folder.script("tasks/endless", "#!/bin/sh\necho begun\nexec sleep 1000\n");
    run_sql(&database, &add_job("endless")).await;
    let mut worker = Running::start(on(&database, &folder, &["--grace-period", "1000"]));
    worker.line(&["INFO: begun"]);
    worker.signal("INT");
    worker.line(&["waiting for running jobs to finish"]);
    worker.signal("INT");
    let (code, log) = worker.end();
    assert_eq!(code, Some(130), "{log}");
    assert_eq!(value(&database, "select count(*) from graphile_worker.jobs where locked_by is null").await, 1);
}

#[tokio::test]
async fn a_third_signal_leaves_no_program_behind() {
    let (database, folder) = (installed_database().await, Folder::new());
    folder.script("tasks/stubborn", "#!/bin/sh\ntrap '' TERM\necho my pid is $$\nwhile :; do sleep 0.1; done\n");
    run_sql(&database, &add_job("stubborn")).await;
    let mut worker = Running::start(on(&database, &folder, &["--grace-period", "1000"]));
    let pid = worker.line(&["INFO: my pid is "]).rsplit(' ').next().unwrap().to_owned();
    // The job cannot be released, and the worker waits for that.
    let mut holder = sqlx::PgConnection::connect_with(&database.options()).await.unwrap();
    let hold = "begin; lock table graphile_worker._private_jobs";
    sqlx::raw_sql(hold).execute(&mut holder).await.unwrap();
    worker.signal("INT");
    worker.line(&["waiting for running jobs to finish"]);
    worker.signal("TERM");
    worker.line(&["shutdown requested", "SIGTERM"]);
    worker.signal("HUP");
    let (code, log) = worker.end();
    // The worker waits for a second only: on a slow machine the last signal may find it gone.
    assert_ne!(code, Some(0), "{log}");
    let program = std::path::Path::new("/proc").join(&pid).join("cmdline");
    let ran_on = std::fs::read_to_string(program).unwrap_or_default();
    assert!(!ran_on.contains("stubborn"), "{pid} runs on: {ran_on}");
}

#[tokio::test]
async fn a_signal_before_the_database_answers_ends_it() {
    // It takes connections and says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = greeting_folder();
    let url = format!("postgres://u@{}/db", silent.local_addr().unwrap());
    let worker = Running::start(folder.graphile_worker(&["-c", &url]));
    let _accepted = silent.accept().unwrap();
    worker.signal("TERM");
    assert_eq!(worker.end().0, Some(143));
}

#[tokio::test]
async fn recovery_is_on_unless_it_is_switched_off() {
    let (database, folder) = (installed_database().await, greeting_folder());
    let mut worker = Running::start(on(&database, &folder, &[]));
    worker.line(&["[worker ", "connected"]);
    assert_eq!(value(&database, "select count(*) from graphile_worker._rs_workers").await, 1);
    worker.signal("TERM");
    assert_eq!(worker.end().0, Some(0));
    let mut without = Running::start(on(&database, &folder, &["--no-recovery"]));
    without.line(&["[worker ", "connected"]);
    assert_eq!(value(&database, "select count(*) from graphile_worker._rs_workers").await, 0);
    without.signal("HUP");
    assert_eq!(without.end().0, Some(0));
}

#[tokio::test]
async fn log_lines_can_be_objects() {
    let (database, folder) = (installed_database().await, greeting_folder());
    run_sql(&database, &add_job("greet")).await;
    let output = on(&database, &folder, &["--once", "--log-format", "json"]).output().unwrap();
    let (stdout, stderr) = texts(&output);
    assert_eq!(stdout, "");
    let lines: Vec<Value> = stderr.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let completed = lines.iter().find(|line| line["message"] == "job completed").unwrap();
    assert_eq!((&completed["job_id"], &completed["task_identifier"]), (&json!(1), &json!("greet")));
    assert!(lines.iter().all(|line| line["time"].is_string() && line["level"].is_string()));
    // Also where it fails.
    let mut failing = folder.graphile_worker(&["--once", "--log-format", "json", "--startup-timeout", "0"]);
    let output = failing.env("DATABASE_URL", "postgres://u@127.0.0.1:1/db").output().unwrap();
    let line: Value = serde_json::from_str(&texts(&output).1).unwrap();
    assert_eq!(line["level"], "ERROR");
    assert!(line["message"].as_str().unwrap().starts_with("could not connect to 127.0.0.1:1"), "{line}");
}

#[tokio::test]
async fn tasks_and_crontab_may_be_elsewhere() {
    let (database, folder) = (installed_database().await, Folder::new());
    folder.script("mine/greet.sh", "#!/bin/sh\ncat\n");
    folder.write("my.crontab", "* * * * * * greet ?jobKey=greet {from: \"crontab\"}\n");
    let arguments = ["--tasks", "mine", "--crontab", "my.crontab"];
    let mut worker = Running::start(on(&database, &folder, &arguments));
    worker.line(&[" greet] ", "\"from\":\"crontab\""]);
    worker.signal("TERM");
    assert_eq!(worker.end().0, Some(0));
}

#[tokio::test]
async fn the_crontab_beside_the_tasks_is_used() {
    let (database, folder) = (installed_database().await, greeting_folder());
    folder.write("crontab", "* * * * * * greet {from: \"crontab\"}\n");
    let mut worker = Running::start(on(&database, &folder, &[]));
    worker.line(&[" greet] ", "\"from\":\"crontab\""]);
    worker.signal("TERM");
    assert_eq!(worker.end().0, Some(0));
}

#[tokio::test]
async fn watch_reloads_changed_tasks_and_crontab() {
    let (database, folder) = (installed_database().await, greeting_folder());
    for flag in ["-w", "--watch"] {
        let _ = std::fs::remove_file(folder.path().join("tasks/late"));
        let mut worker = Running::start(on(&database, &folder, &[flag]));
        worker.line(&["connected and waiting for jobs"]);
        folder.script("tasks/late", "#!/bin/sh\necho better late than never\n");
        run_sql(&database, &add_job("late")).await;
        worker.line(&[" late] ", "INFO: better late than never"]);
        let crontab = format!("* * * * * * greet {{with: \"{flag}\"}}\n");
        folder.write("crontab", &crontab);
        worker.line(&[" greet] ", &format!("\"with\":\"{flag}\"")]);
        worker.signal("TERM");
        assert_eq!(worker.end().0, Some(0));
    }
}

#[tokio::test]
async fn cleanup_deletes_unused_names_and_failed_jobs_and_runs_no_job() {
    let database = installed_database().await;
    run_sql(
        &database,
        "select graphile_worker.add_job('gone', queue_name := 'idle', max_attempts := 1);
         update graphile_worker._private_jobs set attempts = 1;
         select graphile_worker.add_job('stays')",
    )
    .await;
    let cleanup = |tasks: &str| {
        let mut command = graphile_worker(&["--cleanup", tasks]);
        command.env("DATABASE_URL", database.url());
        outcome(command)
    };
    assert_eq!(cleanup("DELETE_PERMAFAILED_JOBS"), (Some(0), "1 row deleted".to_owned()));
    assert_eq!(cleanup("GC_TASK_IDENTIFIERS,GC_JOB_QUEUES"), (Some(0), "2 rows deleted".to_owned()));
    assert_eq!(value(&database, JOBS_LEFT).await, 1);
    let (code, line) = cleanup("EVERYTHING");
    assert_eq!(code, Some(2));
    assert!(line.contains("possible values: GC_TASK_IDENTIFIERS, GC_JOB_QUEUES, DELETE_PERMAFAILED_JOBS"), "{line}");
}

#[tokio::test]
async fn the_database_is_that_of_the_flag_the_environment_or_the_file() {
    let databases = [empty_database().await, empty_database().await, empty_database().await, empty_database().await];
    let [flag, url, pg, file] = &databases;
    let folder = Folder::new();
    folder.write("worker.toml", &format!("connection = \"{}\"\nschema = \"from_file\"\n", file.url()));
    let (server, rest) = (crate::support::server(pg), pg.url().split_once("//").unwrap().1);
    let (host, port) = server.split_once(':').unwrap();
    let password = rest.split_once('@').unwrap().0.split_once(':').unwrap().1;
    let settle = |with: &[&str], schema: &str| {
        let mut command = folder.graphile_worker(&["--schema-only", "--config", "worker.toml"]);
        if with.contains(&"flag") {
            command.args(["-c", flag.url(), "-s", schema]);
        }
        if with.contains(&"url") {
            command.env("DATABASE_URL", url.url()).env("GRAPHILE_WORKER_SCHEMA", schema);
        }
        if with.contains(&"pg") {
            command.env("PGDATABASE", pg.name()).env("PGHOST", host).env("PGPORT", port);
            command.env("PGUSER", "postgres").env("PGPASSWORD", password);
        }
        let (code, line) = outcome(command);
        assert_eq!(code, Some(0), "{line}");
        line
    };
    for (with, schema, expected) in [
        (&["flag", "url", "pg"][..], "from_flag", flag),
        (&["url", "pg"], "from_environment", url),
        (&["pg"], "from_file", pg),
        (&[], "from_file", file),
    ] {
        let line = settle(with, schema);
        let place = format!("schema \"{schema}\" installed at level 20, in the database {:?}", expected.name());
        assert!(line.starts_with(&place), "{line}");
    }
}

#[tokio::test]
async fn settings_come_from_a_configuration_file_with_paths_relative_to_it() {
    let (database, folder) = (installed_database().await, Folder::new());
    folder.script("etc/jobs/greet", "#!/bin/sh\ncat\n");
    let text = format!(
        "connection = \"{}\"\ntasks = \"jobs\"\njobs = 3\npoll-interval = 100\nmax-pool-size = 2\nlog-format = \"json\"\n\
         grace-period = 1\nmax-migration-wait = 2\nno-recovery = true\nno-prepared-statements = true\nwatch = false\n\
         repeatable = [\"gr*\", \"other\"]\n",
        database.url()
    );
    folder.write("etc/worker.toml", &text);
    run_sql(&database, &add_job("greet")).await;
    let output = folder.graphile_worker(&["--config", "etc/worker.toml", "--once"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", texts(&output).1);
    assert!(texts(&output).1.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()));
    let unknown: Vec<String> =
        texts(&output).1.lines().filter(|line| line.contains("repeatable task not found")).map(str::to_owned).collect();
    assert!(unknown.len() == 1 && unknown[0].contains("other"), "{unknown:?}");
    assert_eq!(value(&database, JOBS_LEFT).await, 0);
    let text =
        folder.graphile_worker(&["--config", "etc/worker.toml", "--once", "--log-format=text"]).output().unwrap();
    assert!(!texts(&text).1.starts_with('{'));
}

#[tokio::test]
async fn no_password_is_on_a_command_line_or_in_the_log() {
    let (database, folder) = (installed_database().await, Folder::new());
    let role = format!("r_{}", database.name().replace('-', "_"));
    run_sql(&database, &format!("create role \"{role}\" superuser login password 'secret-word'")).await;
    folder.script("tasks/look", "#!/bin/sh\nps -ef | grep -v grep | grep -c secret-word\necho looked\n");
    let url = format!("postgres://{role}:secret-word@{}/{}", crate::support::server(&database), database.name());
    let mut by_environment = folder.graphile_worker(&["--once"]);
    by_environment.env("DATABASE_URL", &url);
    let by_flag = folder.graphile_worker(&["-c", &url, "--once"]);
    for (id, mut command) in (1..).zip([by_environment, by_flag]) {
        run_sql(&database, &add_job("look")).await;
        let output = command.env("RUST_LOG", "trace").output().unwrap();
        let (stdout, stderr) = texts(&output);
        assert!(stderr.contains("INFO: looked"), "{stderr}");
        assert!(!stdout.contains("secret-word") && !stderr.contains("secret-word"), "{stderr}");
        assert!(stderr.contains(&format!("[job {id} look] INFO: 0")), "{stderr}");
    }
    let mut connection = sqlx::PgConnection::connect_with(&database.options()).await.unwrap();
    sqlx::raw_sql(sqlx::AssertSqlSafe(format!(
        "reassign owned by \"{role}\" to postgres; drop owned by \"{role}\"; drop role \"{role}\""
    )))
    .execute(&mut connection)
    .await
    .unwrap();
}

/// The kernel gives process 1 no signal that it does not listen to.
#[tokio::test]
async fn as_process_1_of_a_container_it_handles_signals() {
    let (database, folder) = (installed_database().await, greeting_folder());
    let plain = on(&database, &folder, &[]);
    let mut alone = Command::new("unshare");
    alone.args(["--pid", "--fork", "--kill-child"]).arg(plain.get_program()).current_dir(folder.path());
    alone.env("DATABASE_URL", database.url());
    if !Command::new("unshare").args(["--pid", "--fork", "true"]).status().is_ok_and(|status| status.success()) {
        return; // Only root can do this, and only on Linux.
    }
    let mut worker = Running::start(alone);
    worker.line(&["connected and waiting for jobs"]);
    let children = format!("/proc/{0}/task/{0}/children", worker.pid());
    let inside = std::fs::read_to_string(children).unwrap();
    assert!(Command::new("kill").args(["-TERM", inside.trim()]).status().unwrap().success());
    worker.line(&["INFO: shutdown requested (signal: SIGTERM)"]);
    assert_eq!(worker.end().0, Some(0));
}

#[tokio::test]
async fn files_in_javascript_and_python_are_tasks_beside_executables() {
    let (database, folder) = (installed_database().await, greeting_folder());
    folder
        .write("tasks/js.js", "module.exports = async ({ name }, { logger }) => logger.info(`JavaScript: ${name}`);\n");
    folder.write("tasks/py.py", "def task(payload, helpers):\n    print('Python:', payload['name'])\n");
    for task in ["js", "py", "greet"] {
        run_sql(&database, &add_job(task)).await;
    }
    let (_, log) =
        texts(&on(&database, &folder, &["--once", "--node", "node", "--python", "python3"]).output().unwrap());
    for line in
        ["[job 1 js] INFO: JavaScript: world", "[job 2 py] INFO: Python: world", "[job 3 greet] INFO: {\"payload\""]
    {
        assert!(log.contains(line), "{line} is not in:\n{log}");
    }
    assert_eq!(value(&database, JOBS_LEFT).await, json!(0));
}

#[tokio::test]
async fn it_exits_with_a_special_code_when_a_newer_release_migrates_the_schema() {
    let (database, folder) = (installed_database().await, greeting_folder());
    let mut worker = Running::start(on(&database, &folder, &[]));
    worker.line(&["INFO: connected and waiting for jobs"]);
    run_sql(&database, &add_job("greet")).await;
    worker.line(&["[job 1 greet] INFO: job completed"]);
    run_sql(&database, "insert into graphile_worker.migrations (id, breaking) values (21, true)").await;
    // Whenever it listens: it may not yet.
    let leave = "select pg_notify('worker:migrate', '{\"migrationNumber\":21,\"breaking\":true}')";
    run_sql(&database, leave).await;
    worker.line(&["WARN: a newer release changes the schema: stopping", "the breaking migration 21"]);
    assert_eq!(worker.end().0, Some(57));
}

#[test]
fn a_signal_ends_a_worker_that_waits_for_the_database() {
    let folder = greeting_folder();
    let mut command = folder.graphile_worker(&[]);
    command.env("DATABASE_URL", "postgres://u:secret@127.0.0.1:1/db");
    let mut worker = Running::start(command);
    let line = worker.line(&["WARN: waiting for the database", "could not connect to 127.0.0.1:1", "at_most: 30s"]);
    assert!(!line.contains("secret"), "{line}");
    worker.signal("TERM");
    assert_eq!(worker.end().0, Some(143));
}

#[test]
fn a_database_that_is_not_ready_in_time_is_reported_with_the_last_error() {
    let folder = greeting_folder();
    folder.write("worker.toml", "startup-timeout = 1");
    let mut command = folder.graphile_worker(&["--config", "worker.toml"]);
    let output = command.env("DATABASE_URL", "postgres://u@127.0.0.1:1/db").output().unwrap();
    let log = texts(&output).1;
    assert_eq!(output.status.code(), Some(1), "{log}");
    let last = log.lines().last().unwrap();
    let (waited, problem) = last.split_once("s: ").expect("a time and a problem");
    assert!(waited.contains("the database was not ready after "), "{log}");
    assert!(problem.starts_with("could not connect to 127.0.0.1:1: "), "{log}");
}

#[tokio::test]
async fn unknown_tasks_of_a_crontab_and_an_empty_folder_are_reported() {
    let (database, folder) = (installed_database().await, Folder::new());
    std::fs::create_dir(folder.path().join("tasks")).unwrap();
    folder.write("crontab", "0 4 * * * clean_up ?id=nightly\n");
    let mut command = folder.graphile_worker(&["--once"]);
    let (_, stderr) = texts(&command.env("DATABASE_URL", database.url()).output().unwrap());
    let unknown = "[cron] WARN: this worker does not define the task of a crontab item (item: nightly, task_identifier: clean_up)";
    assert!(stderr.contains(unknown), "{stderr}");
    assert!(stderr.contains("[worker] WARN: the tasks folder contains no tasks (folder: "), "{stderr}");
    folder.script("tasks/clean_up", "#!/bin/sh\n");
    let mut command = folder.graphile_worker(&["--once"]);
    let (_, stderr) = texts(&command.env("DATABASE_URL", database.url()).output().unwrap());
    assert!(!stderr.contains("WARN"), "{stderr}");
}

#[tokio::test]
async fn files_that_node_would_have_read_are_reported() {
    let (database, folder) = (installed_database().await, greeting_folder());
    let output = on(&database, &folder, &["--once"]).output().unwrap();
    assert!(!texts(&output).1.contains("configuration of Node's worker"), "{}", texts(&output).1);
    folder.write("graphile.config.mts", "export default {};");
    let output = on(&database, &folder, &["--once"]).env("GRAPHILE_LOGGER_DEBUG", "1").output().unwrap();
    let log = texts(&output).1;
    assert!(log.contains("WARN: the configuration of Node's worker is not read:"), "{log}");
    assert!(log.contains("graphile.config.mts") && log.contains("] DEBUG: "), "{log}");
}

#[tokio::test]
async fn the_json_log_lists_the_tasks_as_an_array() {
    let (database, folder) = (installed_database().await, Folder::new());
    folder.script("tasks/one", "#!/bin/sh\n");
    folder.script("tasks/two", "#!/bin/sh\n");
    let mut command = folder.graphile_worker(&["--log-format", "json"]);
    command.env("DATABASE_URL", database.url());
    let mut worker = Running::start(command);
    let line: Value = serde_json::from_str(&worker.line(&["connected and waiting for jobs"])).unwrap();
    assert_eq!(line["tasks"], json!(["one", "two"]));
    worker.signal("TERM");
    assert_eq!(worker.end().0, Some(0));
}

#[tokio::test]
async fn a_file_that_is_not_a_task_is_reported_once_while_the_folder_is_watched() {
    let (database, folder) = (installed_database().await, Folder::new());
    folder.write("tasks/first.txt", "");
    let mut command = folder.graphile_worker(&["--watch"]);
    command.env("DATABASE_URL", database.url());
    let mut worker = Running::start(command);
    worker.line(&["is not a task (file: first.txt, problem: has no run bit"]);
    worker.line(&["connected and waiting for jobs"]);
    folder.write("tasks/second.txt", "");
    worker.line(&["is not a task (file: second.txt, problem: has no run bit"]);
    folder.script("tasks/third", "#!/bin/sh\n");
    worker.line(&["task changed", "third"]);
    worker.signal("TERM");
    let (code, log) = worker.end();
    assert_eq!(code, Some(0));
    assert_eq!(log.matches("is not a task").count(), 2, "{log}");
}
