//! The operator's commands: what they print for people and machines, and how they fail.

use crate::support::{
    Folder, empty_database, failure_of, graphile_worker, installed_database, outcome, run_sql, texts, value,
};
use graphile_worker_devdb::TestDatabase;
use serde_json::{Value, json};
use std::io::Write;
use std::process::{Command, Stdio};

/// The binary on this database.
fn on(database: &TestDatabase, arguments: &[&str]) -> Command {
    let mut command = graphile_worker(arguments);
    command.env("DATABASE_URL", database.url()).env_remove("COLUMNS").env_remove("NO_COLOR");
    command
}

/// Exit code, standard output, standard error.
fn ran(mut command: Command) -> (i32, String, String) {
    let output = command.output().unwrap();
    let (stdout, stderr) = texts(&output);
    (output.status.code().unwrap(), stdout, stderr)
}

/// What a command prints that succeeds.
fn said(database: &TestDatabase, arguments: &[&str]) -> String {
    let (code, stdout, stderr) = ran(on(database, arguments));
    assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}: {stdout}");
    stdout
}

/// The same, read as JSON.
fn answer(database: &TestDatabase, arguments: &[&str]) -> Value {
    serde_json::from_str(&said(database, &[arguments, &["--json"]].concat())).unwrap()
}

fn ids(jobs: &Value) -> Vec<i64> {
    jobs.as_array().unwrap().iter().map(|job| job["id"].as_i64().unwrap()).collect()
}

/// One job in each state: 1 ready, 2 scheduled, 3 running in the queue `q`, 4 retrying, 5 failed, 6 ready behind 3.
async fn one_of_each() -> TestDatabase {
    let database = installed_database().await;
    run_sql(
        &database,
        "select graphile_worker.add_job('send_email', '{\"to\": \"Ann\"}', job_key => 'first', flags => '{x}');
         select graphile_worker.add_job('send_email', run_at => now() + interval '1 hour');
         select graphile_worker.add_job('sync', queue_name => 'q');
         select graphile_worker.add_job('sync', run_at => now() + interval '1 minute');
         select graphile_worker.add_job('sync', max_attempts => 3);
         select graphile_worker.add_job('sync', queue_name => 'q');
         update graphile_worker._private_jobs set locked_at = now(), locked_by = 'w1', attempts = 1 where id = 3;
         update graphile_worker._private_job_queues set locked_at = now(), locked_by = 'w1';
         update graphile_worker._private_jobs set attempts = 1, last_error = 'Connection refused' where id = 4;
         update graphile_worker._private_jobs set attempts = 3, last_error = 'boom' where id = 5",
    )
    .await;
    database
}

#[tokio::test]
async fn add_accepts_every_field_of_a_job() {
    let database = installed_database().await;
    let arguments = [
        "add",
        "send_email",
        r#"{"to":"Ann"}"#,
        "--queue",
        "q",
        "--run-at",
        "2030-01-01T00:00:00+02:00",
        "--max-attempts",
        "5",
        "--priority",
        "-10",
        "--key",
        "k",
        "--key-mode",
        "preserve_run_at",
        "--flag",
        "x",
        "--flag",
        "y",
    ];
    let job = answer(&database, &arguments);
    assert_eq!(
        (&job["id"], &job["task_identifier"], &job["run_at"]),
        (&json!(1), &json!("send_email"), &json!("2029-12-31T22:00:00Z"))
    );
    assert_eq!((&job["payload"], &job["flags"]), (&json!({"to": "Ann"}), &json!(["x", "y"])));
    assert_eq!((&job["max_attempts"], &job["priority"], &job["key"]), (&json!(5), &json!(-10), &json!("k")));
    assert_eq!(value(&database, "select queue_name from graphile_worker.jobs").await, "q");
    let again = said(&database, &["add", "send_email", "--key", "k"]);
    assert!(again.starts_with("job 1 changed: send_email, due "), "{again}");
    assert_eq!(value(&database, "select payload from graphile_worker._private_jobs").await, json!({}));
}

#[tokio::test]
async fn add_reads_a_payload_from_standard_input_and_a_time_from_now() {
    let database = installed_database().await;
    let mut command = on(&database, &["add", "t", "-", "--in", "1h 30m"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"[1, 2]\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let said = texts(&output).0;
    assert!(said.starts_with("job 1 added: t, due in 1h "), "{said}");
    let found = "select payload::text || ' ' || (run_at - created_at between '89 min' and '91 min') from graphile_worker._private_jobs";
    assert_eq!(value(&database, found).await, "[1, 2] true");
}

#[tokio::test]
async fn add_rejects_invalid_jobs_before_it_adds_any() {
    let database = installed_database().await;
    for (arguments, code, message) in [
        (&["add"][..], 2, "required arguments were not provided"),
        (&["add", "t", "{to: Ann}"], 2, "the payload is not valid JSON"),
        (&["add", "t", "--run-at", "tomorrow"], 2, "invalid value 'tomorrow' for '--run-at <TIME>'"),
        (
            &["add", "t", "--in", "soon"],
            2,
            "invalid value 'soon' for '--in <DURATION>': expected a duration such as 90s",
        ),
        (&["add", "t", "--in", "1h", "--run-at", "2030-01-01T00:00:00Z"], 2, "cannot be used with"),
        (&["add", "t", "--key-mode", "replace"], 2, "--key <KEY>"),
        (&["add", "t", "--priority", "70000"], 2, "expected a whole number from -32768 to 32767"),
        (&["add", ""], 1, "Task identifier is empty"),
        (&["add", "t", "--max-attempts", "0"], 1, "maximum attempts must be at least 1"),
        (&["add", "t", "--file", "jobs.ndjson"], 2, "cannot be used with"),
    ] {
        let (found, line) = failure_of(on(&database, arguments));
        assert!(found == code && line.contains(message), "{arguments:?}: {found} {line}");
    }
    assert_eq!(value(&database, "select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn add_adds_all_jobs_of_a_file_or_none() {
    let (database, folder) = (installed_database().await, Folder::new());
    let many: String = (0..1500).map(|n| format!("{{\"identifier\":\"t\",\"payload\":{n}}}\n")).collect();
    let file = folder.write("jobs.ndjson", &many);
    assert_eq!(said(&database, &["add", "--file", file.to_str().unwrap()]), "1500 jobs added\n");
    let order = "select bool_and(payload::text::int = id - 1) from graphile_worker._private_jobs";
    assert_eq!(value(&database, order).await, true);

    let mixed = folder.write(
        "mixed.ndjson",
        r#"{"task":"a","queueName":"q","runAt":"2030-01-01T00:00:00Z","jobKey":"k","jobKeyMode":"preserve_run_at","priority":3,"flags":["f"]}

{"identifier":"b","job_key":"k2","job_key_mode":"unsafe_dedupe","max_attempts":2}"#,
    );
    assert_eq!(answer(&database, &["add", "--file", mixed.to_str().unwrap()])["added"], 2);
    let row =
        "select json_build_array(queue_name, priority, key) from graphile_worker.jobs where task_identifier = 'a'";
    assert_eq!(value(&database, row).await, json!(["q", 3, "k"]));

    let wrong = folder.write("wrong.ndjson", "{\"identifier\":\"c\"}\n{\"identifier\":\"c\",\"prio\":1}\nnot json\n");
    let (code, stdout, stderr) = ran(on(&database, &["add", "--file", wrong.to_str().unwrap()]));
    assert_eq!((code, stdout.as_str()), (1, ""));
    assert_eq!(stderr.lines().count(), 2, "{stderr}");
    assert!(stderr.contains("wrong.ndjson line 2: unknown field `prio`"), "{stderr}");
    assert!(stderr.contains("wrong.ndjson line 3: not a JSON object such as {\"identifier\": \"hello\""), "{stderr}");
    let lines = "{\"payload\":1}\n{\"identifier\":\"c\",\"run_at\":\"noon\"}\n{\"identifier\":5}\n{\"identifier\":\"c\",\"priority\":99999}\n";
    let wrong = folder.write("kinds.ndjson", lines);
    let (_, _, stderr) = ran(on(&database, &["add", "--file", wrong.to_str().unwrap()]));
    for problem in [
        "line 1: missing field `identifier` (the task)",
        "line 2: run_at is not a time: expected a time such as 2030-01-31T12:00:00Z",
        "line 3: found integer `5`, expected a string",
        "line 4: found integer `99999`, expected a whole number from -32768 to 32767",
    ] {
        assert!(stderr.contains(problem), "{problem} is not in {stderr}");
    }
    let refused = folder.write("refused.ndjson", "{\"identifier\":\"c\"}\n{\"identifier\":\"c\",\"max_attempts\":0}\n");
    let (code, line) = failure_of(on(&database, &["add", "--file", refused.to_str().unwrap()]));
    assert!(code == 1 && line.contains("no job was added") && line.contains("Job 2 of 2"), "{line}");
    let (code, line) = failure_of(on(&database, &["add", "--file", "nowhere.ndjson"]));
    assert!(code == 1 && line.contains("could not read nowhere.ndjson"), "{line}");
    assert_eq!(value(&database, "select count(*) from graphile_worker.jobs where task_identifier = 'c'").await, 0);
}

#[tokio::test]
async fn a_payload_is_stored_unchanged_digit_by_digit() {
    let (database, folder) = (installed_database().await, Folder::new());
    let written = ["12345678901234567890123", "1.10", r#"{"b": -0.0,  "a": 1e400, "b": [1E2]}"#, "null"];
    let line = |payload: &str| format!("{{\"identifier\":\"t\",\"payload\": {payload}}}\n");
    for payload in written {
        said(&database, &["add", "t", payload]);
        let alone = folder.write("alone.ndjson", &line(payload));
        said(&database, &["add", "--file", alone.to_str().unwrap()]);
    }
    let all = folder.write("all.ndjson", &written.map(line).concat());
    said(&database, &["add", "--file", all.to_str().unwrap()]);
    let found =
        value(&database, "select array_agg(payload::text order by id) from graphile_worker._private_jobs").await;
    let one_by_one = written.iter().flat_map(|payload| [payload, payload]);
    assert_eq!(found, json!(one_by_one.chain(&written).collect::<Vec<_>>()));
}

#[tokio::test]
async fn list_filters_and_pages() {
    let database = one_of_each().await;
    let listed = |arguments: &[&str]| ids(&answer(&database, &[&["list"], arguments].concat()));
    assert_eq!(listed(&[]), [1, 2, 3, 4, 5, 6]);
    for (arguments, expected) in [
        (&["--state", "ready"][..], vec![1, 6]),
        (&["--state", "running,failed"], vec![3, 5]),
        (&["--state", "locked", "--state", "future"], vec![2, 3]),
        (&["--task", "send_email"], vec![1, 2]),
        (&["--queue", "q"], vec![3, 6]),
        (&["--key", "first"], vec![1]),
        (&["--search", "refused"], vec![4]),
        (&["--search", "ANN"], vec![1]),
        (&["--limit", "2", "--after", "2"], vec![3, 4]),
        (&["--newest", "-n", "2"], vec![6, 5]),
        (&["--task", "nobody's"], vec![]),
    ] {
        assert_eq!(listed(arguments), expected, "{arguments:?}");
    }
    let job = &answer(&database, &["list", "--key", "first"])[0];
    let fields: Vec<&str> = job.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(
        fields,
        [
            "attempts",
            "created_at",
            "flags",
            "id",
            "key",
            "last_error",
            "locked_at",
            "locked_by",
            "max_attempts",
            "priority",
            "queue_name",
            "replaces",
            "revision",
            "run_at",
            "state",
            "task_identifier",
            "updated_at"
        ]
    );
    assert!(job["run_at"].as_str().unwrap().ends_with('Z'), "{job}");
}

#[tokio::test]
async fn list_is_a_table_for_people() {
    let database = one_of_each().await;
    let text = said(&database, &["list", "-n", "5"]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 7, "{text}");
    assert!(lines[0].trim_start().starts_with("id  task"), "{text}");
    assert!(lines[2].contains("scheduled") && lines[2].contains("  in "), "{text}");
    assert!(lines[5].contains("failed") && lines[5].ends_with("boom"), "{text}");
    assert_eq!(lines[6], "more: --after 5");
    assert_eq!(said(&database, &["list", "--task", "nobody's"]), "no jobs\n");
    let (code, line) = failure_of(on(&database, &["list", "--state", "lost"]));
    assert!(code == 2 && line.contains("expected one of ready, scheduled, running, retrying, failed"), "{line}");
}

#[tokio::test]
async fn no_table_is_wider_than_the_terminal() {
    let database = one_of_each().await;
    run_sql(
        &database,
        "select graphile_worker.add_job(repeat('long_name_', 12), '{\"text\": \"a rather long payload it is\"}')",
    )
    .await;
    for width in ["40", "80"] {
        for arguments in [
            &["list"][..],
            &["show", "1"],
            &["show", "7"],
            &["stats"],
            &["queues"],
            &["workers"],
            &["why", "6"],
            &["why", "5"],
            &["doctor"],
            &["uninstall"],
            &["top", "--once"],
        ] {
            let mut command = on(&database, arguments);
            command.env("COLUMNS", width);
            let (_, stdout, _) = ran(command);
            assert!(!stdout.is_empty() && !stdout.contains('\u{1b}'), "{arguments:?}");
            // The sentence of `uninstall` above its table is no table.
            for line in stdout.lines().filter(|line| !line.starts_with("Nothing was changed")) {
                assert!(line.chars().count() <= width.parse().unwrap(), "{arguments:?} at {width}: {line:?}\n{stdout}");
            }
        }
    }
}

#[tokio::test]
async fn show_prints_every_field_of_a_job() {
    let database = one_of_each().await;
    let job = answer(&database, &["show", "1"]);
    assert_eq!(
        (&job["payload"], &job["state"], &job["recoveries"]),
        (&json!({"to": "Ann"}), &json!("ready"), &json!(0))
    );
    assert_eq!((&job["flags"], &job["queue_locked_by"]), (&json!(["x"]), &Value::Null));
    let running = said(&database, &["show", "3"]);
    assert!(running.contains("q, held by w1 since ") && running.contains("payload"), "{running}");
    assert!(said(&database, &["show", "5"]).contains("boom"));
    let (code, line) = failure_of(on(&database, &["show", "99"]));
    assert_eq!(
        (code, line.as_str()),
        (1, "graphile-worker: there is no job 99: it completed, was removed, or never existed")
    );
    let (code, line) = failure_of(on(&database, &["show", "first"]));
    assert!(code == 2 && line.contains("invalid value 'first' for '<ID>'"), "{line}");
}

#[tokio::test]
async fn control_characters_in_texts_are_not_printed() {
    let database = installed_database().await;
    run_sql(&database, "select graphile_worker.add_job(E'evil\\x1b[2J', job_key => E'k\\x07')").await;
    for arguments in [&["list"][..], &["show", "1"], &["stats"], &["why", "1"], &["complete", "1"]] {
        let text = ran(on(&database, arguments)).1;
        assert!(!text.contains(['\u{1b}', '\u{7}']), "{arguments:?}: {text:?}");
    }
}

#[tokio::test]
async fn why_explains_in_sentences_and_as_json() {
    let database = one_of_each().await;
    for (id, sentence) in [
        ("2", "It is not due yet: it will be due in "),
        ("3", "Worker w1 has been running it for "),
        ("4", "It failed once and will be retried in "),
        ("5", "It failed permanently (3 of 3 attempts). The last error: boom"),
        ("6", "Its queue \"q\" has been held by worker w1 for "),
        ("1", "It has the flags [\"x\"]"),
    ] {
        let text = said(&database, &["why", id]);
        assert!(text.contains(sentence), "{id}: {text}");
    }
    let queued = answer(&database, &["why", "6"]);
    let reason = &queued["reasons"][0];
    assert_eq!(
        (&reason["reason"], &reason["job_id"], &reason["worker"]["worker_id"]),
        (&json!("queue_locked"), &json!(3), &json!("w1"))
    );
    assert!(reason["message"].as_str().unwrap().contains("which runs job 3."), "{queued}");
    assert_eq!(queued["fix"], "If that worker is dead: graphile-worker unlock w1");
    assert_eq!(queued["job"]["state"], "ready");

    let (code, stdout, _) = ran(on(&database, &["why", "99", "--json"]));
    let nothing: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &nothing["job"], &nothing["reasons"][0]["reason"]), (1, &Value::Null, &json!("does_not_exist")));
}

#[tokio::test]
async fn why_notices_that_no_worker_runs() {
    let database = installed_database().await;
    run_sql(&database, "select graphile_worker.add_job('t')").await;
    let text = said(&database, &["why", "1"]);
    assert!(text.starts_with("job 1 (ready)  No worker is visible"), "{text}");
}

#[tokio::test]
async fn complete_deletes_jobs_and_reports_those_it_could_not() {
    let database = one_of_each().await;
    let (code, stdout, stderr) = ran(on(&database, &["complete", "1", "3", "99", "5", "1"]));
    assert_eq!((code, stdout.as_str()), (1, "job 1 completed\njob 5 completed\n"));
    let lines: Vec<&str> = stderr.lines().collect();
    assert!(lines[0].starts_with("graphile-worker: job 3 is running on w1, since "), "{stderr}");
    assert_eq!(lines[1..], ["graphile-worker: job 99 does not exist"]);
    assert_eq!(
        value(&database, "select json_agg(id order by id) from graphile_worker.jobs").await,
        json!([2, 3, 4, 6])
    );

    let (code, stdout, _) = ran(on(&database, &["complete", "2", "98", "--json"]));
    let answer: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, ids(&answer["done"]), ids(&answer["not_done"])), (1, vec![2], vec![98]));
    assert_eq!(answer["not_done"][0]["reason"], "does not exist");
}

#[tokio::test]
async fn fail_uses_up_the_attempts_with_a_reason() {
    let database = one_of_each().await;
    assert_eq!(said(&database, &["fail", "1", "--reason", "given up"]), "job 1 failed permanently\n");
    let answer = answer(&database, &["fail", "2"]);
    assert_eq!(answer["done"][0]["last_error"], "Manually marked as failed");
    assert_eq!(answer["done"][0]["attempts"], answer["done"][0]["max_attempts"]);
    assert_eq!(value(&database, "select last_error from graphile_worker.jobs where id = 1").await, "given up");
    assert_eq!(ran(on(&database, &["fail", "3"])).0, 1, "it runs");
}

#[tokio::test]
async fn reschedule_changes_only_the_given_fields() {
    let database = one_of_each().await;
    let changed = answer(
        &database,
        &[
            "reschedule",
            "1",
            "2",
            "--run-at",
            "2030-01-01T00:00:00Z",
            "--priority",
            "-1",
            "--attempts",
            "2",
            "--max-attempts",
            "9",
        ],
    );
    assert_eq!(ids(&changed["done"]), [1, 2]);
    for job in changed["done"].as_array().unwrap() {
        assert_eq!((&job["run_at"], &job["priority"]), (&json!("2030-01-01T00:00:00Z"), &json!(-1)));
        assert_eq!((&job["attempts"], &job["max_attempts"]), (&json!(2), &json!(9)));
    }
    let said_so = said(&database, &["reschedule", "1", "--in", "10m"]);
    assert!(
        said_so.starts_with("job 1 is due in ") && said_so.ends_with(", priority -1, 2 of 9 attempts used\n"),
        "{said_so}"
    );
    assert_eq!(
        said(&database, &["reschedule", "5", "--priority", "1"]),
        "job 5 will not run: 3 of 3 attempts are used\n"
    );
    let (code, line) = failure_of(on(&database, &["reschedule", "1"]));
    assert!(code == 2 && line.contains("required"), "{line}");
    assert_eq!(ran(on(&database, &["reschedule", "3", "--priority", "1"])).0, 1, "it runs");
}

#[tokio::test]
async fn run_now_makes_jobs_due_and_gives_failed_ones_their_attempts_again() {
    let database = one_of_each().await;
    let answer = answer(&database, &["run-now", "2", "4", "5"]);
    let attempts: Vec<&Value> = answer["done"].as_array().unwrap().iter().map(|job| &job["attempts"]).collect();
    assert_eq!((ids(&answer["done"]), attempts), (vec![2, 4, 5], vec![&json!(0), &json!(1), &json!(0)]));
    let due = "select count(*) from graphile_worker.jobs where id in (2, 4, 5) and run_at <= now() and attempts < max_attempts";
    assert_eq!(value(&database, due).await, 3);
    let (code, _, stderr) = ran(on(&database, &["run-now", "3"]));
    assert!(code == 1 && stderr.contains("job 3 is running on w1"), "{stderr}");
}

#[tokio::test]
async fn remove_goes_by_key() {
    let database = one_of_each().await;
    run_sql(&database, "update graphile_worker._private_jobs set key = 'running' where id = 3").await;
    let (code, stdout, stderr) = ran(on(&database, &["remove", "first", "running", "other"]));
    assert_eq!(code, 1);
    assert_eq!(stdout, "job 1 removed\njob 3 is running: its key was removed, and it will not be retried\n");
    assert_eq!(stderr, "graphile-worker: key \"other\": no job has this key\n");
    let (_, stdout, _) = ran(on(&database, &["remove", "other", "--json"]));
    let answer: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(answer, json!({"done": [], "not_done": [{"key": "other", "reason": "no job has this key"}]}));
}

#[tokio::test]
async fn stats_count_by_state_and_task() {
    let database = one_of_each().await;
    let stats = answer(&database, &["stats"]);
    let counts: Vec<&Value> =
        ["ready", "scheduled", "running", "retrying", "failed"].iter().map(|state| &stats[*state]).collect();
    assert_eq!(counts, [2, 1, 1, 1, 1]);
    assert_eq!((&stats["tasks"][1]["task_identifier"], &stats["tasks"][1]["failed"]), (&json!("sync"), &json!(1)));
    assert!(stats["lag_seconds"].is_number() && stats["oldest_due_at"].is_string(), "{stats}");
    let text = said(&database, &["stats"]);
    assert_eq!(text.lines().count(), 4, "{text}");
    assert!(text.lines().nth(1).unwrap().starts_with("(all)"), "{text}");

    let empty = installed_database().await;
    assert_eq!(answer(&empty, &["stats"])["tasks"], json!([]));
    assert_eq!(said(&empty, &["stats"]).lines().count(), 2);
}

#[tokio::test]
async fn queues_show_which_worker_has_locked_them() {
    let database = one_of_each().await;
    let queues = answer(&database, &["queues"]);
    let queue = &queues[0];
    assert_eq!((&queue["queue_name"], &queue["waiting"], &queue["locked_by"]), (&json!("q"), &json!(1), &json!("w1")));
    assert_eq!(queue["running_job_id"], 3);
    assert!(said(&database, &["queues"]).lines().nth(1).unwrap().ends_with("w1"));
    let empty = installed_database().await;
    assert_eq!((answer(&empty, &["queues"]), said(&empty, &["queues"])), (json!([]), "no queues\n".to_owned()));
}

#[tokio::test]
async fn workers_shows_which_workers_are_alive_and_their_jobs() {
    let database = one_of_each().await;
    run_sql(
        &database,
        "insert into graphile_worker._rs_workers (worker_id, version, last_heartbeat_at) values
           ('rs-live-1', '0.1.0', now()), ('rs-live-2', '0.1.0', now() - interval '2 minutes')",
    )
    .await;
    let states = |arguments: &[&str]| -> Value {
        let workers = answer(&database, &[&["workers"], arguments].concat());
        workers
            .as_array()
            .unwrap()
            .iter()
            .map(|worker| (worker["worker_id"].as_str().unwrap().to_owned(), worker["state"].clone()))
            .collect::<serde_json::Map<_, _>>()
            .into()
    };
    assert_eq!(states(&[]), json!({"w1": "unknown", "rs-live-1": "alive", "rs-live-2": "silent"}));
    assert_eq!(states(&["--threshold", "1m"]), json!({"w1": "unknown", "rs-live-1": "alive", "rs-live-2": "stale"}));
    assert!(said(&database, &["workers"]).contains("rs-live-1"));
    let empty = installed_database().await;
    assert_eq!(
        (answer(&empty, &["workers"]), said(&empty, &["workers"])),
        (json!([]), "no workers found\n".to_owned())
    );
}

#[tokio::test]
async fn sweep_releases_the_jobs_of_dead_workers_or_only_lists_them() {
    let database = one_of_each().await;
    assert_eq!(said(&database, &["sweep"]), "no dead workers\n");
    run_sql(
        &database,
        "insert into graphile_worker._rs_workers (worker_id, last_heartbeat_at) values ('rs-live-1', now() - interval '2 minutes');
         update graphile_worker._private_jobs set locked_at = now(), locked_by = 'rs-live-1', attempts = 1 where id = 1",
    )
    .await;
    assert_eq!(said(&database, &["sweep"]), "no dead workers\n", "it is not 5 minutes yet");
    let text = said(&database, &["sweep", "--threshold", "1m", "--dry-run"]);
    assert_eq!(text, "worker rs-live-1 is dead\nnothing was changed: run without --dry-run to release their jobs\n");
    // The log says of each job that it was recovered.
    let (code, stdout, _) = ran(on(&database, &["sweep", "--threshold", "1m", "--delay", "1h", "--json"]));
    let swept: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(code, 0);
    assert_eq!(
        swept,
        json!({
            "dry_run": false, "worker_ids": ["rs-live-1"], "not_dead_yet": [], "recovered_count": 1, "somebody_else_sweeps": false
        })
    );
    let freed =
        "select locked_by is null and run_at > now() + interval '59 min' from graphile_worker.jobs where id = 1";
    assert_eq!(value(&database, freed).await, true);
}

#[tokio::test]
async fn a_worker_with_a_longer_heartbeat_interval_is_not_swept_and_is_reported() {
    let database = installed_database().await;
    run_sql(
        &database,
        "insert into graphile_worker._rs_workers (worker_id, last_heartbeat_at, heartbeat_interval)
         values ('rs-live-1', now() - interval '2 minutes', '10 minutes')",
    )
    .await;
    let text = said(&database, &["sweep", "--threshold", "1m"]);
    let (worker, verdict) = text.split_once('\n').unwrap();
    assert!(worker.starts_with("worker rs-live-1 sent its last heartbeat 2m"), "{text}");
    assert!(worker.ends_with("counts as dead only after two of its heartbeat intervals"), "{text}");
    assert_eq!(verdict, "no dead workers\n");
    assert_eq!(answer(&database, &["sweep", "--threshold", "1m"])["not_dead_yet"], json!(["rs-live-1"]));
    assert_eq!(said(&database, &["sweep"]), "no dead workers\n");
}

#[tokio::test]
async fn a_missing_schema_is_named_in_the_advice() {
    let database = installed_database().await;
    let (code, line) = failure_of(on(&database, &["-s", "nope", "list"]));
    let advice = "run `graphile-worker -s nope migrate`, or set the right schema with -s";
    assert!(code == 1 && line.ends_with(advice), "{line}");
    let (code, stdout, _) = ran(on(&database, &["-s", "nope", "doctor"]));
    assert!(code == 1 && stdout.contains("Run `graphile-worker -s nope migrate`."), "{stdout}");
}

#[tokio::test]
async fn a_permanently_failed_job_has_no_next_run() {
    let database = installed_database().await;
    run_sql(
        &database,
        "select graphile_worker.add_job('t', max_attempts => 1, run_at => now() + interval '2 hours');
         update graphile_worker._private_jobs set attempts = 1",
    )
    .await;
    let text = said(&database, &["list"]);
    assert!(text.contains("failed") && !text.contains("in 2h") && !text.contains("in 1h"), "{text}");
}

#[tokio::test]
async fn top_shows_tasks_with_nothing_to_do_last() {
    let database = installed_database().await;
    run_sql(
        &database,
        "select graphile_worker.add_job('aaa', run_at => now() + interval '1 day'), graphile_worker.add_job('bbb')",
    )
    .await;
    let text = said(&database, &["top", "--once"]);
    assert!(text.find("bbb").unwrap() < text.find("aaa").unwrap(), "{text}");
}

#[tokio::test]
async fn a_narrow_terminal_shows_which_columns_are_hidden() {
    let database = one_of_each().await;
    let mut command = on(&database, &["stats"]);
    command.env("COLUMNS", "40");
    let (_, text, _) = ran(command);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.ends_with("… columns omitted: retrying, scheduled"), "{text}");
    let mut command = on(&database, &["migrate"]);
    command.env("COLUMNS", "40");
    let (_, text, _) = ran(command);
    assert!(text.lines().count() > 1 && text.lines().all(|line| line.chars().count() <= 40), "{text}");
}

#[tokio::test]
async fn unlock_releases_the_jobs_of_a_worker_unless_it_is_alive() {
    let database = one_of_each().await;
    run_sql(
        &database,
        "insert into graphile_worker._rs_workers (worker_id) values ('rs-live-1');
         update graphile_worker._private_jobs set locked_at = now(), locked_by = 'rs-live-1', attempts = 1 where id = 1",
    )
    .await;
    let (code, stdout, stderr) = ran(on(&database, &["unlock", "w1", "rs-live-1", "nobody"]));
    assert_eq!((code, stdout.as_str()), (1, "worker w1: 1 job and 1 queue released\n"));
    assert_eq!(
        stderr,
        "graphile-worker: worker rs-live-1 has sent a heartbeat recently, but no connection has its name: if it is dead, use --force\n\
         graphile-worker: worker nobody holds nothing\n"
    );
    let forced = answer(&database, &["unlock", "--force", "rs-live-1"]);
    assert_eq!(forced, json!({"done": [{"worker_id": "rs-live-1", "jobs": 1, "queues": 0}], "not_done": []}));
    assert_eq!(value(&database, "select count(*) from graphile_worker.jobs where locked_by is not null").await, 0);
}

#[tokio::test]
async fn cleanup_deletes_what_is_requested_and_jobs_only_if_requested() {
    let database = one_of_each().await;
    run_sql(
        &database,
        "insert into graphile_worker._private_tasks (identifier) values ('unused');
         insert into graphile_worker._private_job_queues (queue_name) values ('unused')",
    )
    .await;
    assert_eq!(said(&database, &["cleanup"]), "deleted: 0 failed jobs, 1 task, 1 queue\n");
    let deleted = answer(&database, &["cleanup", "delete_permafailed_jobs"]);
    assert_eq!(deleted, json!({"deleted": 1, "failed_jobs": 1, "task_identifiers": 0, "job_queues": 0}));
    let (code, line) = failure_of(on(&database, &["cleanup", "everything"]));
    assert!(code == 2 && line.contains("GC_TASK_IDENTIFIERS"), "{line}");
}

#[tokio::test]
async fn migrate_installs_and_reports_it_also_as_json() {
    let database = empty_database().await;
    let installed = answer(&database, &["migrate"]);
    assert_eq!((&installed["from"], &installed["changed"]), (&Value::Null, &json!(true)));
    assert_eq!((&installed["schema"], &installed["database"]), (&json!("graphile_worker"), &json!(database.name())));
    let (code, line) = outcome(on(&database, &["migrate"]));
    assert!(code == Some(0) && line.contains("is up to date at level"), "{line}");
}

#[tokio::test]
async fn uninstall_first_reports_what_it_would_drop() {
    let database = one_of_each().await;
    run_sql(&database, "create view public.mine as select id from graphile_worker.jobs").await;
    let text = said(&database, &["uninstall"]);
    assert!(
        text.starts_with("Nothing was changed. Use --yes to drop schema \"graphile_worker\" with 6 jobs:\n"),
        "{text}"
    );
    assert!(text.contains("view public.mine") && text.contains("6 (1 running)"), "{text}");
    assert_eq!(value(&database, "select count(*) from graphile_worker.jobs").await, 6);
    let dropped = answer(&database, &["uninstall", "--yes"]);
    assert_eq!((&dropped["dropped"], &dropped["jobs"]), (&json!(true), &json!(6)));
    assert_eq!(value(&database, "select count(*) from pg_namespace where nspname = 'graphile_worker'").await, 0);
    let (code, line) = failure_of(on(&database, &["uninstall", "--yes"]));
    assert!(code == 1 && line.contains("nothing to uninstall"), "{line}");
}

#[tokio::test]
async fn doctor_gives_advice_and_fails_if_there_is_a_problem() {
    let database = installed_database().await;
    let report = answer(&database, &["doctor"]);
    let check = |name: &str| report["checks"].as_array().unwrap().iter().find(|check| check["name"] == name).unwrap();
    for name in
        ["server_version", "schema", "functions", "role", "dead_rows", "long_transactions", "notification_queue", "lag"]
    {
        assert!(check(name)["level"].is_string() && check(name)["found"].is_string(), "{name}");
    }
    assert_eq!(check("schema")["level"], "ok");

    run_sql(&database, "select graphile_worker.add_job('t', run_at => now() - interval '1 hour')").await;
    let (code, stdout, _) = ran(on(&database, &["doctor"]));
    assert_eq!(code, 1, "{stdout}");
    assert!(stdout.contains("problem") && stdout.contains("due jobs: 1, the oldest for 1h"), "{stdout}");
    assert!(stdout.contains("→ Start a worker"), "{stdout}");

    let (code, stdout, _) = ran(on(&empty_database().await, &["doctor", "--json"]));
    assert!(code == 1 && stdout.contains("Run `graphile-worker migrate`."), "{stdout}");
}

#[tokio::test]
async fn top_prints_one_frame_if_the_output_is_not_a_terminal() {
    let database = one_of_each().await;
    let text = said(&database, &["top"]);
    assert!(text.contains("added/s ") && text.contains("ready 2  running 1"), "{text}");
    for part in ["send_email", "sync", "w1", "running job"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let frame = answer(&database, &["top"]);
    assert_eq!((&frame["stats"]["running"], &frame["running"][0]["id"]), (&json!(1), &json!(3)));
    assert!(frame["added_per_second"].is_number() && frame["removed_per_second"].is_number(), "{frame}");
    assert_eq!((&frame["queues"][0]["queue_name"], &frame["workers"][0]["worker_id"]), (&json!("q"), &json!("w1")));
}

#[tokio::test]
async fn every_command_gives_advice_if_nothing_is_installed() {
    let database = empty_database().await;
    for arguments in [
        &["list"][..],
        &["show", "1"],
        &["why", "1"],
        &["add", "t"],
        &["complete", "1"],
        &["fail", "1"],
        &["run-now", "1"],
        &["reschedule", "1", "--in", "1m"],
        &["remove", "k"],
        &["stats"],
        &["queues"],
        &["workers"],
        &["sweep"],
        &["unlock", "w"],
        &["cleanup"],
        &["top"],
    ] {
        let (code, line) = failure_of(on(&database, arguments));
        assert!(code == 1 && line.contains("not installed in schema \"graphile_worker\""), "{arguments:?}: {line}");
        assert!(line.ends_with("`, or set the right schema with -s"), "{arguments:?}: {line}");
    }
}

#[tokio::test]
async fn a_schema_that_is_too_new_is_left_alone() {
    let database = one_of_each().await;
    run_sql(&database, "insert into graphile_worker.migrations (id, breaking) values (1000, true)").await;
    for arguments in [&["list"][..], &["add", "t"], &["complete", "1"], &["cleanup"], &["migrate"]] {
        let (code, line) = failure_of(on(&database, arguments));
        assert!(code == 1 && line.contains("has the breaking migration 1000"), "{arguments:?}: {line}");
    }
    let (code, stdout, _) = ran(on(&database, &["doctor"]));
    assert!(code == 1 && stdout.contains("has the breaking migration 1000"), "{stdout}");
    assert_eq!(value(&database, "select count(*) from graphile_worker.jobs").await, 6);
}

#[tokio::test]
async fn list_works_on_the_schema_of_nodes_worker_and_workers_advises_to_migrate() {
    let database = one_of_each().await;
    run_sql(
        &database,
        "drop table graphile_worker._rs_workers, graphile_worker._rs_recoveries, graphile_worker._rs_additions",
    )
    .await;
    assert_eq!(ids(&answer(&database, &["list", "--state", "failed"])), [5]);
    let (code, line) = failure_of(on(&database, &["workers"]));
    assert!(code == 1 && line.ends_with("run `graphile-worker migrate`, or set the right schema with -s"), "{line}");
}

#[tokio::test]
async fn a_role_without_rights_gets_an_error_and_never_an_empty_queue() {
    let database = one_of_each().await;
    let role = format!("operator_{}", std::process::id());
    run_sql(&database, &format!("create role {role} login password 'secret'")).await;
    let (_, rest) = database.url().split_once('@').unwrap();
    let url = format!("postgres://{role}:secret@{rest}");
    let as_role = |arguments: &[&str]| {
        let mut command = on(&database, arguments);
        command.env("DATABASE_URL", &url);
        command
    };
    let (code, line) = failure_of(as_role(&["list"]));
    assert!(code == 1 && line.contains("permission denied") && line.contains("doctor"), "{line}");
    run_sql(&database, &format!("grant usage on schema graphile_worker to {role}; grant all on all tables in schema graphile_worker to {role}")).await;
    let (code, line) = failure_of(as_role(&["list"]));
    assert!(code == 1 && line.contains("row security hides the jobs"), "{line}");
    let (code, stdout, _) = ran(as_role(&["doctor"]));
    assert!(code == 1 && stdout.contains("sees no rows") && !stdout.contains("secret"), "{stdout}");
    run_sql(&database, &format!("drop owned by {role}; drop role {role}")).await;
}

#[test]
fn an_unreachable_server_is_reported_without_its_password() {
    for arguments in [&["list"][..], &["doctor"], &["top"], &["uninstall", "--yes"]] {
        let mut command = graphile_worker(arguments);
        command.env("DATABASE_URL", "postgres://user:secret@127.0.0.1:1/db");
        let (code, line) = failure_of(command);
        assert!(code == 1 && line.contains("could not connect to 127.0.0.1:1"), "{line}");
    }
}

#[tokio::test]
async fn cancel_says_what_became_of_each_job() {
    let database = one_of_each().await;
    run_sql(&database, "update graphile_worker._private_jobs set locked_by = 'rs-worker-a' where id = 3").await;
    let arguments = ["cancel", "1", "3", "5", "99", "--reason", "wrong address"];
    let (code, stdout, stderr) = ran(on(&database, &arguments));
    assert_eq!(code, 1);
    assert_eq!(stdout, "job 1 cancelled\njob 3 is running: worker rs-worker-a was asked to stop it\n");
    assert_eq!(
        stderr,
        "graphile-worker: job 5 has failed permanently, or was cancelled, before\n\
         graphile-worker: job 99 does not exist\n"
    );
    let job = answer(&database, &["show", "1"]);
    assert_eq!((&job["state"], &job["last_error"]), (&json!("cancelled"), &json!("Cancelled: wrong address")));
    assert_eq!(ids(&answer(&database, &["list", "--state", "cancelled"])), [1]);
    assert_eq!(answer(&database, &["stats"])["cancelled"], 1);
    assert!(said(&database, &["stats"]).contains("cancelled"));
    let why = said(&database, &["why", "1"]);
    assert!(why.contains("It was cancelled. The reason: wrong address"), "{why}");
    let why = said(&database, &["why", "3"]);
    assert!(why.contains("cancelled while it ran") && why.contains("cancel --force 3"), "{why}");
}

#[tokio::test]
async fn cancel_takes_the_filters_of_list() {
    let database = one_of_each().await;
    let cancelled = answer(&database, &["cancel", "--task", "send_email"]);
    assert_eq!(cancelled["not_done"], json!([]));
    assert_eq!(cancelled["done"][1], json!({ "id": 2, "outcome": "cancelled", "worker_id": null }));
    assert_eq!(ids(&answer(&database, &["list", "--state", "cancelled"])), [1, 2]);
    assert_eq!(said(&database, &["cancel", "--task", "send_email"]), "no jobs\n");
    let (code, _, stderr) = ran(on(&database, &["cancel", "--queue", "q", "--force"]));
    assert_eq!(code, 1);
    assert!(stderr.contains("job 3 is running on w1, which cannot stop it"), "{stderr}");
    assert_eq!(ran(on(&database, &["cancel"])).0, 2, "ids or a filter");
    assert_eq!(ran(on(&database, &["cancel", "4", "--task", "sync"])).0, 2, "not both");
}

#[tokio::test]
async fn a_job_can_be_added_with_an_expiry() {
    let database = installed_database().await;
    said(&database, &["add", "hello", "--expires-in", "10m"]);
    let folder = Folder::new();
    let file = folder.write("jobs", "{\"identifier\": \"hello\", \"expires_at\": \"2000-01-01T00:00:00Z\"}\n");
    said(&database, &["add", "--file", file.to_str().unwrap()]);
    run_sql(&database, "select graphile_worker._rs_expire_due_jobs()").await;
    assert_eq!(ids(&answer(&database, &["list", "--state", "failed"])), [2]);
    assert!(said(&database, &["why", "2"]).contains("did not start in time"));
    run_sql(&database, "update graphile_worker._rs_expiries set check_at = now() where expires_at between now() + interval '9 minutes' and now() + interval '10 minutes'").await;
    assert_eq!(
        value(&database, "select count(*)::int from graphile_worker._rs_expiries where check_at <= now()").await,
        1
    );
}

#[tokio::test]
async fn add_replaces_a_running_job_and_says_what_the_new_one_waits_for() {
    let database = installed_database().await;
    let replace = |more: &[&'static str]| [&["add", "t", "[1]", "--key", "k", "--replace-running"], more].concat();
    assert_eq!(said(&database, &replace(&[])), "job 1 added: t, due now\n");
    let first = answer(&database, &replace(&["--in", "1h", "--priority", "3"]));
    assert_eq!((&first["id"], &first["outcome"], &first["waits_for"]), (&json!(1), &json!("replaced"), &json!([])));
    assert_eq!(first["priority"], 3);

    run_sql(
        &database,
        "update graphile_worker._private_jobs set locked_at = now(), locked_by = 'worker-of-node', attempts = 1",
    )
    .await;
    assert_eq!(
        said(&database, &replace(&["--force", "--reason", "newer"])),
        "job 3 added: t, starts when job 1 has ended in worker worker-of-node, which cannot stop it\n"
    );
    run_sql(&database, "update graphile_worker._private_jobs set locked_by = 'rs-a' where id = 1").await;
    assert_eq!(said(&database, &replace(&[])), "job 3 changed: t, starts when job 1 has stopped in worker rs-a\n");
    let json = answer(&database, &replace(&[]));
    assert_eq!(
        (&json["id"], &json["outcome"], &json["waits_for"], &json["worker_id"]),
        (&json!(3), &json!("stopping"), &json!([1]), &json!("rs-a"))
    );
    assert!(said(&database, &["list"]).contains("after job 1"));
    assert!(said(&database, &["show", "3"]).contains("job 1, starts afterwards"));
    assert_eq!(answer(&database, &["show", "3"])["replaces"], json!([1]));
    assert_eq!(answer(&database, &["why", "3"])["reasons"][0]["reason"], "replaced_is_running");
    assert!(said(&database, &["show", "1"]).contains("Cancelled: newer"));
}

#[tokio::test]
async fn add_debounces_and_throttles() {
    let database = installed_database().await;
    let debounce = ["add", "t", "1", "--key", "d", "--debounce", "5m", "--max-wait", "10m", "--queue", "q"];
    assert_eq!(said(&database, &debounce), "job 1 added: t, due in 5m\n");
    let again = answer(&database, &debounce);
    assert_eq!((&again["id"], &again["revision"]), (&json!(1), &json!(1)));
    let throttle = ["add", "t", "1", "--key", "t", "--throttle", "1m"];
    assert_eq!(answer(&database, &throttle)["key"], "t");
    assert_eq!(said(&database, &["list", "--queue", "q"]).lines().count(), 2);
    run_sql(&database, "delete from graphile_worker._private_jobs where key = 't'").await;
    let later = answer(&database, &throttle)["run_at"].as_str().unwrap().to_owned();
    assert!(later.parse::<chrono::DateTime<chrono::Utc>>().unwrap() > chrono::Utc::now(), "{later}");
}

#[tokio::test]
async fn add_rejects_options_that_make_no_sense_together() {
    let database = installed_database().await;
    for (options, problem) in [
        ("--debounce 5s", "--key <KEY>"),
        ("--throttle 5s", "--key <KEY>"),
        ("--replace-running", "--key <KEY>"),
        ("--key k --debounce 5s --throttle 5s", "'--throttle <DURATION>'"),
        ("--key k --debounce 5s --in 5s", "'--in <DURATION>'"),
        ("--key k --throttle 5s --priority 5", "'--priority <N>'"),
        ("--key k --debounce 5s --replace-running", "'--replace-running'"),
        ("--key k --replace-running --key-mode replace", "'--key-mode <MODE>'"),
        ("--key k --max-wait 5s", "--debounce <DURATION>"),
        ("--key k --force", "--replace-running"),
        ("--key k --reason x", "--replace-running"),
        ("--key k --debounce 5s --max-wait 1s", "--max-wait must be at least as long as --debounce (5s), got 1s"),
    ] {
        let arguments: Vec<&str> = ["add", "t"].into_iter().chain(options.split(' ')).collect();
        let (code, _, stderr) = ran(on(&database, &arguments));
        assert!(code == 2 && stderr.contains(problem), "{options}: {code} {stderr}");
    }
    assert_eq!(value(&database, "select count(*) from graphile_worker.jobs").await, 0);
}
