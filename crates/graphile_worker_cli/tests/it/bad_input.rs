//! Invalid input: one message, an exit code, and no partial effect.

use crate::support::{
    Folder, empty_database, failure, failure_of, graphile_worker, installed_database, one_line, run_sql, server, texts,
    value,
};
use std::process::Command;

fn folder_with_a_task() -> Folder {
    let folder = Folder::new();
    folder.script("tasks/greet", "#!/bin/sh\ncat\n");
    folder
}

#[test]
fn invalid_options_are_usage_errors() {
    for (arguments, message) in [
        (&["--frobnicate"][..], "unexpected argument '--frobnicate' found"),
        (&["frobnicate"], "unrecognized subcommand 'frobnicate'"),
        (&["--jobs", "many"], "invalid value 'many' for '--jobs <N>': expected a whole number"),
        (&["--job", "3"], "unexpected argument '--job' found; did you mean '--jobs'?"),
        (&["lst"], "unrecognized subcommand 'lst'; did you mean 'list'?"),
        (&["show", "abc"], "invalid value 'abc' for '<ID>': expected a job id, which is a number"),
        (
            &["add", "t", "--run-at", "noon"],
            "invalid value 'noon' for '--run-at <TIME>': expected a time such as 2030-01-31T12:00:00Z",
        ),
        (&["crontab"], "`crontab` needs a subcommand: `check` or `next`"),
        (&["crontab", "next", "x", "--count", "0"], "invalid value '0' for '--count <N>': must be at least 1"),
        (&["--jobs=postgres://u:secret@h/db"], "unexpected connection string: pass it with -c"),
        (&["postgres://u:secret@h/db"], "unexpected connection string: pass it with -c"),
        (&["--jobs", "0", "-c", "db"], "jobs must be at least 1, got 0"),
        (&["-m", "0", "-c", "db"], "max-pool-size must be at least 1, got 0"),
        (&["--poll-interval", "0", "-c", "db"], "poll-interval must be at least 1, got 0"),
        (&["--poll-interval", "-5"], "unexpected argument '-5' found"),
        (&["--once", "--schema-only"], "the argument '--once' cannot be used with '--schema-only'"),
        (&["--once", "--watch"], "the argument '--once' cannot be used with '--watch'"),
        (&["--log-format", "xml"], "invalid value 'xml' for '--log-format <FORMAT>' [possible values: json, text]"),
        (&["--once", "crontab", "check", "x"], "--once is for running jobs: remove it, `crontab` does not run any"),
        (&["--jobs", "3", "dev"], "--jobs must come after `dev`: graphile-worker dev --jobs"),
        (&["dev", "-c", "postgres://u:secret@h/db"], "`dev` has its own database: remove -c"),
        (&[], "no database given: use -c URL, or set DATABASE_URL or PGDATABASE"),
    ] {
        let (code, line) = failure(arguments);
        assert_eq!(code, 2, "{line}");
        assert!(line.starts_with(&format!("graphile-worker: {message}")), "{line}");
        assert!(line.ends_with("(see --help)"), "{line}");
    }
}

#[test]
fn an_invalid_environment_is_a_usage_error() {
    for (name, wrong, message) in [
        (
            "DATABASE_URL",
            "postgres://u:secret@host:port/db",
            "DATABASE_URL is invalid: port is \"port\", expected a number",
        ),
        (
            "GRAPHILE_WORKER_JOBS",
            "many",
            "invalid value 'many' for '--jobs <N>' in GRAPHILE_WORKER_JOBS: expected a whole number",
        ),
        ("GRAPHILE_WORKER_JOBS", "postgres://u:secret@h/db", "unexpected connection string: pass it with -c"),
    ] {
        let mut command = graphile_worker(&[]);
        command.env(name, wrong);
        let (code, line) = failure_of(command);
        assert_eq!(code, 2, "{line}");
        assert!(line.starts_with(&format!("graphile-worker: {message}")), "{line}");
    }
}

#[test]
fn an_invalid_configuration_file_is_a_usage_error() {
    let folder = folder_with_a_task();
    for (text, message) in [
        ("jbos = 4", "configuration file worker.toml: line 1: unknown field `jbos`, expected one of `connection`"),
        ("schema = \"s\"\njobs = \"four\"", "line 2: jobs is string \"four\", expected a whole number (0 or more)"),
        ("connection = postgres://u:secret@host/db", "line 1: "),
        ("jobs = 0\nconnection = \"db\"", "jobs must be at least 1, got 0"),
        (
            "connection = \"postgres://u:secret@host:port/db\"",
            "the connection in the configuration file is invalid: port is \"port\"",
        ),
    ] {
        folder.write("worker.toml", text);
        let (code, line) = failure_of(folder.graphile_worker(&["--config", "worker.toml"]));
        assert_eq!(code, 2, "{line}");
        assert!(line.contains(message), "{line}");
    }
    let (code, line) = failure_of(folder.graphile_worker(&["--config", "none.toml"]));
    assert_eq!(code, 2);
    assert!(line.contains("configuration file none.toml: could not read it: No such file or directory"), "{line}");
}

#[tokio::test]
async fn a_failed_connection_is_reported_without_the_password() {
    let (database, folder) = (empty_database().await, folder_with_a_task());
    let wrong_password = format!("postgres://postgres:secret@{}/{}", server(&database), database.name());
    let nowhere = database.url().replace(database.name(), "nowhere");
    for (url, message) in [
        ("postgres://u:secret@127.0.0.1:1/db", "could not connect to 127.0.0.1:1: "),
        ("postgres://u:secret@no-such-host.invalid/db", "could not connect to no-such-host.invalid:5432: "),
        (&*wrong_password, "password authentication failed for user \"postgres\""),
        (&*nowhere, "database \"nowhere\" does not exist"),
        ("postgres://u:secret@127.0.0.1:1/db?sslmode=verify-full", "could not connect to 127.0.0.1:1: "),
    ] {
        for how in [&["--once"][..], &["--schema-only"], &["migrate"], &["--cleanup", "GC_JOB_QUEUES"], &[]] {
            let mut command = folder.graphile_worker(how);
            command.env("DATABASE_URL", url).env("GRAPHILE_WORKER_STARTUP_TIMEOUT", "0");
            let (code, line) = failure_of(command);
            assert_eq!(code, 1, "{line}");
            assert!(line.contains(message), "{line}");
        }
    }
}

#[tokio::test]
async fn a_role_without_rights_gets_advice() {
    let (database, folder) = (empty_database().await, folder_with_a_task());
    let role = format!("poor_{}", database.name().replace('-', "_"));
    run_sql(&database, &format!("create role \"{role}\" login password 'secret'")).await;
    let mut command = folder.graphile_worker(&["--once"]);
    command.env("DATABASE_URL", format!("postgres://{role}:secret@{}/{}", server(&database), database.name()));
    let (code, line) = failure_of(command);
    run_sql(&database, &format!("drop role \"{role}\"")).await;
    assert_eq!(code, 1);
    assert!(line.contains("this role may not create it: ask the database owner to run `create schema"), "{line}");
}

#[tokio::test]
async fn a_schema_that_is_too_new_is_left_alone() {
    let (database, folder) = (installed_database().await, folder_with_a_task());
    run_sql(
        &database,
        "insert into graphile_worker.migrations (id, breaking) values (99, true);
         select graphile_worker.add_job('greet')",
    )
    .await;
    for how in [&[][..], &["--once"], &["migrate"], &["--cleanup", "GC_TASK_IDENTIFIERS"]] {
        let mut command = folder.graphile_worker(how);
        command.env("DATABASE_URL", database.url());
        let (code, line) = failure_of(command);
        assert_eq!(code, 1);
        assert!(line.contains("has the breaking migration 99 of Node's graphile-worker"), "{line}");
    }
    assert_eq!(value(&database, "select count(*) from graphile_worker.jobs where locked_by is null").await, 1);
}

#[tokio::test]
async fn an_invalid_tasks_folder_is_reported_before_the_database_is_used() {
    let (database, folder) = (empty_database().await, Folder::new());
    folder.write("file", "");
    for (arguments, message) in [
        (&[][..], "the tasks folder tasks does not exist: create it with one file per task"),
        (&["--once", "--tasks", "elsewhere"], "the tasks folder elsewhere does not exist"),
        (&["--tasks", "file"], "file is a file, expected a folder"),
    ] {
        let mut command = folder.graphile_worker(arguments);
        command.env("DATABASE_URL", database.url());
        let (code, line) = failure_of(command);
        assert_eq!(code, 1);
        assert!(line.contains(message), "{line}");
    }
    assert_eq!(value(&database, "select to_regnamespace('graphile_worker') is null").await, true);
}

#[tokio::test]
async fn a_crontab_with_three_errors_is_reported_before_the_database_is_used() {
    let (database, folder) = (empty_database().await, folder_with_a_task());
    folder.write("crontab", "61 4 * * 1 a\n* * * * * b ?nope=1\n* * * * * c {wrong\n");
    let mut command = folder.graphile_worker(&[]);
    let output = command.env("DATABASE_URL", database.url()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let (stdout, stderr) = texts(&output);
    assert_eq!(stdout, "");
    for mistake in ["line 1, column 1: minute is `61`, expected 0–59", "line 2, column ", "line 3, column "] {
        assert_eq!(stderr.matches(mistake).count(), 1, "{stderr}");
    }
    assert_eq!(value(&database, "select to_regnamespace('graphile_worker') is null").await, true);
    let (code, line) = failure_of({
        let mut command = folder.graphile_worker(&["--crontab", "none"]);
        command.env("DATABASE_URL", database.url());
        command
    });
    assert_eq!(code, 1);
    assert!(line.contains("could not read the crontab none: No such file or directory"), "{line}");
}

#[tokio::test]
async fn a_task_without_its_run_bit_is_named_and_the_others_run() {
    let (database, folder) = (installed_database().await, folder_with_a_task());
    folder.write("tasks/forgotten", "#!/bin/sh\n");
    run_sql(&database, "select graphile_worker.add_job('greet')").await;
    let mut command = folder.graphile_worker(&["--once"]);
    let output = command.env("DATABASE_URL", database.url()).output().unwrap();
    let (_, stderr) = texts(&output);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert_eq!(
        stderr
            .lines()
            .filter(|line| line.contains("WARN")
                && line.contains("(file: forgotten, problem: has no run bit: chmod +x it if it is a task)"))
            .count(),
        1,
        "{stderr}"
    );
    assert_eq!(value(&database, "select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn a_broken_interpreter_line_fails_the_job_with_the_reason() {
    let (database, folder) = (installed_database().await, Folder::new());
    folder.script("tasks/broken", "#!/no/such/interpreter\n");
    run_sql(&database, "select graphile_worker.add_job('broken')").await;
    let mut command = folder.graphile_worker(&["--once"]);
    let output = command.env("DATABASE_URL", database.url()).output().unwrap();
    let (_, stderr) = texts(&output);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let error = value(&database, "select last_error from graphile_worker.jobs").await;
    let error = error.as_str().unwrap();
    assert!(error.contains("broken") && error.contains("/no/such/interpreter"), "{error}");
}

#[test]
fn help_version_completions_and_the_manual_need_no_database() {
    for arguments in [&["--help"][..], &["-h"], &["--version"], &["-V"], &["dev", "--help"], &["man"]] {
        let output = graphile_worker(arguments).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty());
    }
    let help = one_line(&texts(&graphile_worker(&["--help"]).output().unwrap()).0);
    for flag in [
        "-c, --connection",
        "-s, --schema",
        "--schema-only",
        "--once",
        "-w, --watch",
        "--crontab",
        "-j, --jobs",
        "-m, --max-pool-size",
        "--repeatable",
        "--poll-interval",
        "--no-prepared-statements",
        "--cleanup",
        "--tasks",
        "--grace-period",
        "--max-migration-wait",
        "--startup-timeout",
        "--no-recovery",
        "--log-format",
        "--config",
        "[default: 10]",
        "[default: 2000]",
        "--node",
        "--python",
        "Prefer DATABASE_URL",
    ] {
        assert!(help.contains(flag), "{flag} is not in:\n{help}");
    }
    for (shell, words) in [
        ("bash", "complete -F _graphile__worker"),
        ("zsh", "#compdef graphile-worker"),
        ("fish", "complete -c graphile-worker"),
    ] {
        assert!(texts(&graphile_worker(&["completions", shell]).output().unwrap()).0.contains(words));
    }
    let mut bash = Command::new("bash");
    let script = texts(&graphile_worker(&["completions", "bash"]).output().unwrap()).0;
    let checked = bash.args(["-n", "-c", &script]).output().unwrap();
    assert!(checked.status.success(), "{}", texts(&checked).1);
    let manual = texts(&graphile_worker(&["man"]).output().unwrap()).0;
    assert!(manual.contains(".TH graphile-worker 1") && manual.contains("poll\\-interval"), "{manual}");
}

#[test]
fn without_a_database_an_ignored_configuration_of_nodes_is_named() {
    let folder = Folder::new();
    let (code, line) = failure_of(folder.graphile_worker(&["list"]));
    assert!(code == 2 && line.contains("no database given") && !line.contains("graphile.config"), "{line}");
    folder.write("graphile.config.ts", "export default { worker: { connectionString: \"postgres:///my_app\" } };");
    for arguments in [&["list"][..], &[], &["--once"]] {
        let (code, line) = failure_of(folder.graphile_worker(arguments));
        assert!(code == 2 && line.contains("no database given"), "{line}");
        assert!(
            line.contains(
                "graphile.config.ts configures Node's worker and is not read: pass its connectionString with -c"
            ),
            "{line}"
        );
    }
}
