//! `limit`, `pause` and `resume`, limits in the configuration file, and what the other commands say of limits.

use crate::support::{Folder, graphile_worker, installed_database, one_line, run_sql, texts, value};
use graphile_worker_devdb::TestDatabase;
use serde_json::{Value, json};

/// Exit code, standard output, standard error.
fn ran(database: &TestDatabase, arguments: &[&str]) -> (i32, String, String) {
    let mut command = graphile_worker(arguments);
    command.env("DATABASE_URL", database.url()).env_remove("COLUMNS");
    let output = command.output().unwrap();
    let (stdout, stderr) = texts(&output);
    (output.status.code().unwrap(), stdout, stderr)
}

/// What a command prints that succeeds.
fn said(database: &TestDatabase, arguments: &[&str]) -> String {
    let (code, stdout, stderr) = ran(database, arguments);
    assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}: {stdout}");
    stdout
}

/// The same, read as JSON.
fn answer(database: &TestDatabase, arguments: &[&str]) -> Value {
    serde_json::from_str(&said(database, &[arguments, &["--json"]].concat())).unwrap()
}

/// The exit code and the only line of a command that fails.
fn failed(database: &TestDatabase, arguments: &[&str]) -> (i32, String) {
    let (code, stdout, stderr) = ran(database, arguments);
    assert_eq!((stdout.as_str(), stderr.lines().count()), ("", 1), "{arguments:?}: {stderr}");
    (code, stderr.trim_end().trim_start_matches("graphile-worker: ").to_owned())
}

/// Two jobs of a task, and three of two tenants.
async fn with_jobs() -> TestDatabase {
    let database = installed_database().await;
    run_sql(
        &database,
        "select graphile_worker.add_job('send_email') from generate_series(1, 2);
         select graphile_worker.add_job('sync', queue_name => 'tenant:1') from generate_series(1, 2);
         select graphile_worker.add_job('sync', queue_name => 'tenant:2')",
    )
    .await;
    database
}

#[tokio::test]
async fn limits_are_set_listed_and_dropped() {
    let database = with_jobs().await;
    assert_eq!(said(&database, &["limit", "list"]), "no limits\n");
    assert_eq!(answer(&database, &["limit", "list"]), json!([]));
    let set = said(&database, &["limit", "set", "group:api", "--concurrency", "20"]);
    assert_eq!(set, "limit group:api set: concurrency 20; 0 waiting\n");
    let email = ["limit", "set", "task:send_email", "--concurrency", "5", "--rate", "100/m", "--burst", "10"];
    let set = said(&database, &[&email[..], &["--group", "api", "--cost", "2"]].concat());
    assert_eq!(set, "limit task:send_email set: concurrency 5, rate 100/m, burst 10, cost 2, group:api; 2 waiting\n");
    let set = answer(&database, &["limit", "set", "queue:tenant:*", "--weight", "2.5", "--rate", "5/10s"]);
    assert_eq!((&set["name"], &set["weight"], &set["rate"]), (&json!("queue:tenant:*"), &json!(2.5), &json!(5)));
    assert_eq!((&set["per_seconds"], &set["waiting"], &set["queues"]), (&json!(10.0), &json!(3), &json!(2)));
    let list = said(&database, &["limit", "list"]);
    let words: Vec<&str> = list.lines().find(|line| line.starts_with("task:")).unwrap().split_whitespace().collect();
    assert_eq!(words, ["task:send_email", "0", "of", "5", "5", "2", "100/m", "group:api", "10", "2"]);
    assert!(list.lines().next().unwrap().contains("next start"), "{list}");
    let listed = answer(&database, &["limit", "list"]);
    let names: Vec<&Value> = listed.as_array().unwrap().iter().map(|limit| &limit["name"]).collect();
    assert_eq!(names, ["group:api", "queue:tenant:*", "task:send_email"]);
    // Set again, it has only the new settings.
    let set = said(&database, &["limit", "set", "task:send_email", "--rate", "1/day"]);
    assert_eq!(set, "limit task:send_email set: rate 1/day, burst 1; 2 waiting\n");
    assert_eq!(said(&database, &["limit", "drop", "group:api"]), "limit group:api dropped\n");
    let dropped = ran(&database, &["limit", "drop", "task:send_email", "queue:tenant:*", "task:nothing", "--json"]);
    assert_eq!(dropped.0, 1);
    assert_eq!(
        serde_json::from_str::<Value>(&dropped.1).unwrap(),
        json!({ "done": ["task:send_email", "queue:tenant:*"], "not_done": ["task:nothing"] })
    );
    assert_eq!(one_line(&dropped.2), "graphile-worker: there is no limit task:nothing: see `limit list`");
    assert_eq!(value(&database, "select count(*) from graphile_worker._rs_lanes").await, 0);
}

#[tokio::test]
async fn invalid_limits_are_one_line_with_advice_and_change_nothing() {
    let database = with_jobs().await;
    for (arguments, code, message) in [
        (&["limit"][..], 2, "`limit` needs a subcommand: `set` or `list` or `drop`"),
        (
            &["limit", "set", "task:send_email"],
            2,
            "Limit task:send_email needs a concurrency, a rate, a group, a weight or a breaker.",
        ),
        (&["limit", "set", "send_email", "--concurrency", "1"], 2, "Limit name is 'send_email', expected task:NAME"),
        (
            &["limit", "set", "task:x", "--concurrency", "0"],
            2,
            "Concurrency must be at least 1, got 0. To start no jobs",
        ),
        (&["limit", "set", "task:x", "--concurrency", "-1"], 2, "invalid value '-1' for '--concurrency <N>'"),
        (
            &["limit", "set", "task:x", "--rate", "100"],
            2,
            "invalid value '100' for '--rate <N/PERIOD>': expected a number and a period, such as 100/m",
        ),
        (&["limit", "set", "task:x", "--burst", "3"], 2, "Burst 3 needs a rate."),
        (&["limit", "set", "task:x", "--trip", "5"], 2, "Trip 5 needs a pause: for how long no job starts after it"),
        (&["limit", "set", "task:x", "--trip-for", "5m"], 2, "Pause 00:05:00 needs a trip: the number of failures"),
        (&["limit", "set", "task:x", "--trip", "0", "--trip-for", "5m"], 2, "Trip must be at least 1 failure, got 0."),
        (&["limit", "set", "task:x", "--trip", "-1", "--trip-for", "5m"], 2, "invalid value '-1' for '--trip <N>'"),
        (
            &["limit", "set", "task:x", "--trip", "5", "--trip-for", "soon"],
            2,
            "invalid value 'soon' for '--trip-for <DURATION>': expected a duration such as 90s",
        ),
        (&["limit", "set", "queue:a", "--weight", "-2"], 2, "Weight must be more than 0 and at most 1000000, got -2."),
        (
            &["limit", "set", "task:x", "--concurrency", "1"],
            1,
            "There is no task 'x'. A task exists once a worker that runs it has started",
        ),
        (&["limit", "set", "queue:a", "--group", "g"], 1, "There is no group 'g'. Set the limit of the group first."),
        (&["limit", "drop", "task:x"], 1, "there is no limit task:x: see `limit list`"),
        (&["pause", "task:x"], 1, "There is no task 'x'."),
        (
            &["pause", "everything"],
            1,
            "Limit name is 'everything', expected task:NAME, queue:NAME, queue:PREFIX*, group:NAME or all.",
        ),
        (
            &["pause", "all", "--until", "soon"],
            2,
            "invalid value 'soon' for '--until <TIME>': expected a time such as 2030-01-31T12:00:00Z, or a duration such as 2h",
        ),
        (&["pause", "all", "--until", "2001-01-01"], 1, "A pause must end in the future, got 2001-01-01"),
        (&["resume", "all"], 1, "all is not paused: see `limit list`"),
    ] {
        let (found, line) = failed(&database, arguments);
        assert!(found == code && line.starts_with(message), "{arguments:?}: {found} {line}");
    }
    assert_eq!(value(&database, "select count(*) from graphile_worker._rs_limits").await, 0);
}

#[tokio::test]
async fn pauses_name_who_and_until_when_and_are_resumed() {
    let database = with_jobs().await;
    assert_eq!(said(&database, &["pause", "all"]), "all is paused until it is resumed; Node's workers continue\n");
    let paused = said(&database, &["pause", "task:send_email", "--until", "2h"]);
    assert!(paused.starts_with("task:send_email is paused until 2") && paused.contains("(in "), "{paused}");
    let paused = answer(&database, &["pause", "queue:tenant:1", "--until", "2100-01-31 12:00"]);
    assert_eq!((&paused["is_paused"], &paused["paused_until"]), (&json!(true), &json!("2100-01-31T12:00:00Z")));
    let list = said(&database, &["limit", "list"]);
    assert!(list.contains("by postgres") && list.contains(", ends in "), "{list}");
    let why = said(&database, &["why", "1"]);
    assert!(why.contains("All jobs are paused until they are resumed; role postgres paused them"), "{why}");
    assert!(why.contains("The task \"send_email\" is paused for "), "{why}");
    assert!(why.contains("To resume: graphile-worker resume all"), "{why}");
    assert_eq!(said(&database, &["resume", "all"]), "all is resumed\n");
    assert_eq!(
        answer(&database, &["resume", "task:send_email"]),
        json!({ "name": "task:send_email", "resumed": true })
    );
    let (code, stdout, _) = ran(&database, &["resume", "task:send_email", "--json"]);
    assert_eq!(code, 1);
    assert_eq!(serde_json::from_str::<Value>(&stdout).unwrap(), json!({ "name": "task:send_email", "resumed": false }));
    said(&database, &["resume", "queue:tenant:1"]);
    assert_eq!(said(&database, &["limit", "list"]), "no limits\n");
}

#[tokio::test]
async fn breakers_are_set_and_say_whether_they_have_tripped() {
    let database = with_jobs().await;
    let set = said(&database, &["limit", "set", "task:send_email", "--trip", "5", "--trip-for", "90s"]);
    assert_eq!(set, "limit task:send_email set: trips after 5 for 1m 30s; 2 waiting\n");
    said(&database, &["limit", "set", "queue:tenant:*", "--trip", "3", "--trip-for", "1m"]);
    run_sql(
        &database,
        "update graphile_worker._rs_limits set failures = 5, tripped_at = now() - interval '10 seconds',
           closed_until = now() + interval '80 seconds' where name = 'task:send_email';
         update graphile_worker._rs_lanes set closed_until = now() + interval '30 seconds' where queue_name = 'tenant:1'",
    )
    .await;
    let list = said(&database, &["limit", "list"]);
    assert!(list.contains("after 5 for 1m 30s") && list.contains("5 failures in a row"), "{list}");
    assert!(list.contains("ago, ends in 1m") && list.contains("1 queue: rate limited, ends in "), "{list}");
    let why = said(&database, &["why", "1"]);
    assert!(why.contains("The breaker of the task \"send_email\" tripped 1"), "{why}");
    assert!(why.contains("s ago: 5 jobs failed in a row. No job starts for another 1m"), "{why}");
    assert!(why.contains("To start jobs now: graphile-worker resume task:send_email"), "{why}");
    let (_, doctor, _) = ran(&database, &["doctor", "--json"]);
    assert!(doctor.contains("tripped: task:send_email"), "{doctor}");
    let listed = answer(&database, &["limit", "list"]);
    assert_eq!((&listed[1]["failures"], &listed[1]["trip_seconds"]), (&json!(5), &json!(90.0)));
    assert_eq!(said(&database, &["resume", "task:send_email"]), "task:send_email is resumed\n");
    let listed = answer(&database, &["limit", "list"]);
    assert_eq!((&listed[1]["failures"], &listed[1]["tripped_at"]), (&json!(0), &Value::Null));
}

#[tokio::test]
async fn other_commands_show_limits_and_the_queues_of_limited_jobs() {
    let database = with_jobs().await;
    said(&database, &["limit", "set", "queue:tenant:*", "--concurrency", "2"]);
    said(&database, &["limit", "set", "task:send_email", "--concurrency", "1"]);
    run_sql(
        &database,
        "update graphile_worker._private_jobs set locked_at = now(), locked_by = 'rs-live-00112233445566778899aabb', attempts = 1
         where id in (1, 3)",
    )
    .await;
    let queues = said(&database, &["queues"]);
    let first = one_line(queues.lines().nth(1).unwrap());
    assert_eq!(first.split_whitespace().collect::<Vec<_>>().join(" ").split(' ').next(), Some("tenant:1"));
    assert!(first.contains("1 of 2, queue:tenant:*"), "{queues}");
    let json = answer(&database, &["queues"]);
    assert_eq!((&json[0]["limit"], &json[0]["concurrency"]), (&json!("queue:tenant:*"), &json!(2)));
    assert!(said(&database, &["list", "--queue", "tenant:1"]).contains("tenant:1"));
    let show = said(&database, &["show", "4"]);
    assert!(show.contains("tenant:1") && show.contains("queue:tenant:*") && !show.contains("free"), "{show}");
    let why = said(&database, &["why", "2"]);
    assert!(why.contains("The limit task:send_email is reached: 1 of 1 are in use."), "{why}");
    let why = answer(&database, &["why", "2"]);
    let reached = why["reasons"].as_array().unwrap().iter().find(|reason| reason["reason"] == "limit_reached").unwrap();
    assert_eq!((&reached["limit"], &reached["in_use"]), (&json!("task:send_email"), &json!(1)));
    let doctor = said(&database, &["doctor", "--json"]);
    assert!(doctor.contains("2, all in use"), "{doctor}");
}

#[tokio::test]
async fn the_configuration_file_sets_limits_when_the_worker_starts() {
    let (database, folder) = (installed_database().await, Folder::new());
    folder.script("tasks/send_email", "#!/bin/sh\n");
    folder.write(
        "worker.toml",
        "jobs = 2\n\
         [limits.\"task:send_email\"]\nconcurrency = 5\nrate = \"100/m\"\ngroup = \"api\"\n\
         [limits.\"group:api\"]\nconcurrency = 20\n\
         [limits.\"queue:tenant:*\"]\nweight = 2\ntrip = 5\ntrip_for = \"1m\"\n",
    );
    let run = || {
        let mut worker = folder.graphile_worker(&["--config", "worker.toml", "--once"]);
        texts(&worker.env("DATABASE_URL", database.url()).output().unwrap()).1
    };
    let log = run();
    assert_eq!(log.matches("limit set").count(), 3, "{log}");
    let limits = answer(&database, &["limit", "list"]);
    assert_eq!((&limits[0]["name"], &limits[2]["group"]), (&json!("group:api"), &json!("group:api")));
    assert_eq!((&limits[1]["weight"], &limits[2]["rate"]), (&json!(2.0), &json!(100)));
    assert_eq!((&limits[1]["trip"], &limits[1]["trip_seconds"]), (&json!(5), &json!(60.0)));
    said(&database, &["limit", "set", "task:send_email", "--concurrency", "9"]);
    let log = run();
    assert!(log.contains("limit replaced by the options of this worker"), "{log}");
    // A mistake is reported before anything starts.
    folder.write("worker.toml", "[limits.\"task:send_email\"]\nconcurrency = 0\n");
    let mut worker = folder.graphile_worker(&["--config", "worker.toml", "--once"]);
    let output = worker.env("DATABASE_URL", database.url()).output().unwrap();
    let wrong = "configuration file worker.toml: limits.\"task:send_email\": Concurrency must be at least 1, got 0.";
    assert_eq!(output.status.code(), Some(2));
    assert!(texts(&output).1.contains(wrong), "{}", texts(&output).1);
}
