//! Which database the binary finds, and what it says about one that it cannot use.

use crate::support::{
    Folder, Running, empty_database, failure_of, graphile_worker, installed_database, run_sql, server, texts, value,
    wait_for_file, wait_until,
};
use graphile_worker_devdb::TestDatabase;
use serde_json::json;
use std::os::unix::fs::PermissionsExt;

/// User, password, host, port and name.
fn parts(database: &TestDatabase) -> [String; 5] {
    let (login, rest) = database.url().strip_prefix("postgres://").unwrap().split_once('@').unwrap();
    let (user, password) = login.split_once(':').unwrap();
    let (server, name) = rest.split_once('/').unwrap();
    let (host, port) = server.split_once(':').unwrap();
    [user, password, host, port, name].map(str::to_owned)
}

#[tokio::test]
async fn the_database_may_be_named_in_every_way_of_libpq() {
    let database = installed_database().await;
    let [user, password, host, port, name] = parts(&database);
    let folder = Folder::new();
    let services = format!("[mine]\nhost={host}\nport={port}\nuser={user}\ndbname={name}\npassword={password}\n");
    let services = folder.write("services.conf", &services).display().to_string();
    let passwords = folder.write("passwords", &format!("{host}:{port}:{name}:{user}:{password}\n"));
    std::fs::set_permissions(&passwords, PermissionsExt::from_mode(0o600)).unwrap();
    let passwords = passwords.display().to_string();
    let config = folder
        .write("config.toml", &format!("connection = \"service=mine\"\npassword-command = \"echo {password}\"\n"));
    let config = config.display().to_string();
    let pairs = format!("host={host} port={port} user={user} password={password} dbname={name}");
    let without_password = format!("host=127.0.0.1:1,{host} port=1,{port} user={user} dbname={name}")
        .replace("127.0.0.1:1,", "127.0.0.1,");
    for (what, arguments, variables) in [
        ("pairs", vec!["-c", &pairs], vec![]),
        ("a service", vec!["-c", "service=mine"], vec![("PGSERVICEFILE", &*services)]),
        ("PGSERVICE", vec![], vec![("PGSERVICE", "mine"), ("PGSERVICEFILE", &*services), ("PGHOST", "wrong.invalid")]),
        ("a password file", vec!["-c", &without_password], vec![("PGPASSFILE", &*passwords)]),
        ("PGPASSWORD", vec!["-c", &without_password], vec![("PGPASSWORD", &*password)]),
        (
            "variables",
            vec![],
            vec![
                ("PGDATABASE", &*name),
                ("PGHOST", &*host),
                ("PGPORT", &*port),
                ("PGUSER", &*user),
                ("PGPASSWORD", &*password),
            ],
        ),
        ("the configuration file", vec!["--config", &config], vec![("PGSERVICEFILE", &*services)]),
    ] {
        let mut command = graphile_worker(&["stats"]);
        let output = command.args(arguments).envs(variables).output().unwrap();
        let (_, stderr) = texts(&output);
        assert!(output.status.success(), "{what}: {stderr}");
    }
    let mut command = graphile_worker(&["stats", "-c", &without_password]);
    command.env("PGPASSFILE", &passwords);
    std::fs::set_permissions(&passwords, PermissionsExt::from_mode(0o644)).unwrap();
    let output = command.output().unwrap();
    assert!(texts(&output).1.contains("ignoring the password file, because other users can read it: run chmod 600"));
}

#[test]
fn unsupported_parameters_are_reported_and_secrets_are_not_printed() {
    for (variables, arguments, message) in [
        (
            vec![("PGSSLMODE", "verify_full")],
            vec!["-c", "db"],
            "the connection string after -c is invalid: PGSSLMODE is \"verify_full\", expected one of",
        ),
        (
            vec![("PGDATABASE", "db"), ("PGCHANNELBINDING", "require")],
            vec![],
            "the connection of the PG variables is invalid: PGCHANNELBINDING is \"require\", which is not supported",
        ),
        (
            vec![("PGDATABASE", "db"), ("PGTARGETSESSIONATTRS", "master")],
            vec![],
            "the connection of the PG variables is invalid: PGTARGETSESSIONATTRS is \"master\", expected one of",
        ),
        (
            vec![("PGDATABASE", "db"), ("PGSSLNEGOTIATION", "direct")],
            vec![],
            "the connection of the PG variables is invalid: PGSSLNEGOTIATION is \"direct\", which is not supported",
        ),
        (
            vec![("PGDATABASE", "db"), ("PGCONNECT_TIMEOUT", "soon")],
            vec![],
            "the connection of the PG variables is invalid: PGCONNECT_TIMEOUT is \"soon\", expected a whole number",
        ),
        (
            vec![("PGSERVICE", "none"), ("PGSERVICEFILE", "/nonexistent")],
            vec![],
            "the connection of the PG variables is invalid: service \"none\" is not defined: /nonexistent does not exist",
        ),
        (
            vec![("DATABASE_URL", "postgres://u:hunter2@h/db?sslpassword=hunter2")],
            vec![],
            "DATABASE_URL is invalid: sslpassword is not supported",
        ),
        (
            vec![("DATABASE_URL", "postgres://u:hunter2@h/db?no_such=hunter2")],
            vec![],
            "DATABASE_URL is invalid: unknown parameter \"no_such\"",
        ),
        (
            vec![],
            vec!["-c", "postgres://u:hunter2@h/db?sslrootcert=/nonexistent/ca.crt"],
            "the connection string after -c is invalid: sslrootcert is \"/nonexistent/ca.crt\", which cannot be read: No such file",
        ),
        (vec![], vec!["-c", ""], "the connection string after -c is empty"),
    ] {
        let mut command = graphile_worker(&["stats"]);
        command.args(arguments).envs(variables).env("RUST_LOG", "trace");
        let output = command.output().unwrap();
        let (_, stderr) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(&format!("graphile-worker: {message}")), "{stderr}");
        assert!(!stderr.contains("hunter2"), "{stderr}");
    }
}

/// A valid address without a server.
#[test]
fn an_ipv6_host_in_the_environment_is_an_address() {
    let mut command = graphile_worker(&["stats"]);
    command.envs([("PGHOST", "::1"), ("PGPORT", "1"), ("PGDATABASE", "db")]);
    let (code, line) = failure_of(command);
    assert_eq!(code, 1, "{line}");
    assert!(line.starts_with("graphile-worker: could not connect to [::1]:1: "), "{line}");
}

#[tokio::test]
async fn a_password_command_runs_for_each_connection() {
    let (database, folder) = (installed_database().await, Folder::new());
    let [_, _, _, _, name] = parts(&database);
    let role = format!("asked_{name}");
    run_sql(&database, &format!("create role \"{role}\" login superuser password 'first'")).await;
    let url = format!("postgres://{role}@{}/{name}", server(&database));
    let file = folder.write("password", "first\n").display().to_string();
    let command = format!("cat '{file}'");
    let output = folder.graphile_worker(&["stats", "-c", &url, "--password-command", &command]).output().unwrap();
    assert!(output.status.success(), "{}", texts(&output).1);
    let mut broken = folder.graphile_worker(&["stats", "-c", &url, "--password-command", "echo sealed >&2; exit 3"]);
    broken.stdin(std::process::Stdio::null());
    let (code, line) = failure_of(broken);
    assert_eq!(code, 1, "{line}");
    assert!(
        line.contains("could not get the password: the password command failed (exit status: 3): sealed"),
        "{line}"
    );

    // The password is rotated while a job runs; its outcome is written all the same.
    let (begun, go_on) = (folder.path().join("begun"), folder.path().join("go_on"));
    folder.script(
        "tasks/t",
        &format!("#!/bin/sh\ntouch '{}'\nwhile [ ! -e '{}' ]; do sleep 0.05; done\n", begun.display(), go_on.display()),
    );
    run_sql(&database, "select graphile_worker.add_job('t')").await;
    let mut worker = folder.graphile_worker(&["-c", &url, "-j", "2"]);
    worker.env("GRAPHILE_WORKER_PASSWORD_COMMAND", &command);
    let mut worker = Running::start(worker);
    wait_for_file(&begun).await;
    run_sql(&database, &format!("alter role \"{role}\" password 'second'")).await;
    run_sql(&database, &format!("select pg_terminate_backend(pid) from pg_stat_activity where usename = '{role}'"))
        .await;
    worker.line(&["WARN: lost the database"]);
    folder.write("password", "second\n");
    worker.line(&["the database is back"]);
    std::fs::write(&go_on, "").unwrap();
    wait_until(&database, "select count(*) from graphile_worker.jobs", json!(0)).await;
    worker.signal("TERM");
    assert_eq!(worker.end().0, Some(0));
    run_sql(&database, &format!("reassign owned by \"{role}\" to postgres; drop role \"{role}\"")).await;
}

/// One of the servers does not answer, and one is not there.
#[tokio::test]
async fn an_operator_command_finds_the_server_that_is_up() {
    let database = empty_database().await;
    let [user, password, host, port, name] = parts(&database);
    let url = format!("postgres://{user}:{password}@127.0.0.1:1,{host}:{port}/{name}?target_session_attrs=read-write");
    let output = graphile_worker(&["--schema-only", "-c", &url]).output().unwrap();
    assert!(output.status.success(), "{}", texts(&output).1);
    assert_eq!(value(&database, "select count(*) from graphile_worker.jobs").await, json!(0));
}
