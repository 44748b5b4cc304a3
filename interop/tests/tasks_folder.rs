//! A folder of tasks as projects have it, run by Node's command line and by ours: what is noted, what is left and why are
//! the same. In `projects/realistic` are modules and CommonJS, nested, one in TypeScript; tasks that throw, hang, end the
//! process, work in a transaction, take a batch.

#![allow(missing_docs)]

use graphile_worker_interop::{AtWork, CommandLine, Db, Ended, project};
use serde_json::{Value, json};
use std::os::unix::process::ExitStatusExt;

const OURS: CommandLine = CommandLine::Ours(env!("CARGO_BIN_EXE_ours"));
const NODES: CommandLine = CommandLine::Nodes("graphile-worker");
const OLDER_NODES: CommandLine = CommandLine::Nodes("graphile-worker-0.17");

/// Every task of the folder that ends by itself once, and some twice.
const JOBS: &str = r#"
  select graphile_worker.add_job('hello', '{"name": "Bobby Tables"}');
  select graphile_worker.add_job('nested/module', '{"text": "loud"}');
  select graphile_worker.add_job('typed', '{"count": 21}');
  select graphile_worker.add_job('throws');
  select graphile_worker.add_job('throws_text');
  select graphile_worker.add_job('transaction', '{"n": 1}');
  select graphile_worker.add_job('transaction', '{"n": 2, "fails": true}');
  select graphile_worker.add_job('batch', '[{"id": 1}, {"id": 2, "bad": true}, {"id":  3}]');
  select graphile_worker.add_job('adds', '{"b": 1, "a": 2}');
  select graphile_worker.add_job('described', queue_name := 'q', job_key := 'k', priority := 4, max_attempts := 9, flags := array['f']);
"#;

/// A database with a place for notes, and these jobs.
async fn database(jobs: &str) -> Db {
    let db = Db::ours().await;
    db.run("create table noted (task text, value jsonb)").await;
    db.run(jobs).await;
    db
}

async fn noted(db: &Db) -> Value {
    db.value("select json_agg(noted order by task, value) from noted").await
}

/// What is left. Of errors the first line, because ours also say where; but for a batch, which each worker words in its own
/// way, and for what is thrown and no error, of which Node's does not keep the text.
async fn left(db: &Db) -> Value {
    db.value(
        r"select json_agg(json_build_array(
            task_identifier, queue_name, priority, attempts, max_attempts, key, revision, flags, locked_by, locked_at,
            (select payload::jsonb from graphile_worker._private_jobs p where p.id = j.id),
            case when task_identifier not in ('batch', 'throws_text') then split_part(last_error, E'\n', 1) end,
            last_error like '%item 2 is bad%',
            case when task_identifier = 'unknown' then run_at > now() + interval '1 year' end
          ) order by task_identifier, priority, key, id) from graphile_worker.jobs j",
    )
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn both_command_lines_run_a_folder_with_the_same_result() {
    let after = async |command_line: CommandLine| {
        let db = database(JOBS).await;
        let ended = command_line.runs_once(&db, &project("realistic")).await;
        assert!(ended.status.success(), "{command_line:?}: {ended:?}");
        db
    };
    let (ours, node, older) = tokio::join!(after(OURS), after(NODES), after(OLDER_NODES));
    assert_eq!(noted(&ours).await, noted(&node).await);
    assert_eq!(left(&ours).await, left(&node).await);
    let (all_noted, all_left) = (noted(&ours).await, left(&ours).await);
    assert_eq!(all_noted.as_array().map(Vec::len), Some(5), "{all_noted}");
    let count = |task: &str| all_left.as_array().map(|left| left.iter().filter(|job| job[0] == task).count());
    assert_eq!((count("throws"), count("batch"), count("unknown")), (Some(1), Some(1), Some(3)), "{all_left}");
    assert_eq!(count("transaction"), Some(1), "{all_left}");
    assert!(all_noted.to_string().contains(&json!({"doubled": 42}).to_string()), "{all_noted}");

    // Before 0.18, Node's worker did not load TypeScript.
    older.run("delete from graphile_worker._private_jobs where id = 3 and attempts = 0").await;
    ours.run("delete from noted where task = 'typed'").await;
    assert_eq!(noted(&ours).await, noted(&older).await);
    assert_eq!(left(&ours).await, left(&older).await);
}

/// Starts a worker for four jobs at once, and returns when as many tasks hang as there are, and all others are done.
async fn with_hanging_jobs(command_line: CommandLine, jobs: &str) -> (Db, AtWork) {
    let db = database(jobs).await;
    // Ours waits for them on the slowest of machines; Node's would for ever.
    let environment = [("GRAPHILE_LOGGER_DEBUG", "1"), ("GRAPHILE_WORKER_GRACE_PERIOD", "60")];
    let worker = command_line.start_with(&db, &project("realistic"), &["-j", "4"], &environment);
    db.until(
        "select (select count(*) from noted where value ? 'began') =
                (select count(*) from graphile_worker.jobs where task_identifier = 'hangs')",
    )
    .await;
    db.until("select count(*) = 0 from graphile_worker.jobs where task_identifier <> 'hangs'").await;
    (db, worker)
}

/// Node's worker tells them 5 seconds after the signal, ours at once: they have the 5 seconds to end in. What then becomes
/// of them Node's worker does not wait to have written before it ends itself, so that a job may stay locked that is done or
/// has failed. In ours, as the specification has it, they are completed first.
#[tokio::test(flavor = "multi_thread")]
async fn tasks_that_hang_delay_no_others_and_are_aborted_when_the_worker_stops() {
    const HANGING: &str = r#"
      select graphile_worker.add_job('hangs', '{"then": "returns"}');
      select graphile_worker.add_job('hangs', '{"then": "throws"}');
      select graphile_worker.add_job('hello', json_build_object('name', n)) from generate_series(1, 5) as n;
    "#;
    let after = async |command_line: CommandLine| {
        let (db, worker) = with_hanging_jobs(command_line, HANGING).await;
        worker.signal("TERM");
        (worker.ended().await, noted(&db).await, left(&db).await)
    };
    let (ours, node) = tokio::join!(after(OURS), after(NODES));
    assert_eq!(ours.1, node.1, "what they noted, to be told included");
    let ours_left = ours.2.as_array().expect("a list");
    let [failed] = &ours_left[..] else { panic!("one has failed, and one is done: {ours_left:?}") };
    assert_eq!((&failed[10], &failed[11]), (&json!({"then": "throws"}), &json!("had to stop")));
    for job in node.2.as_array().into_iter().flatten() {
        let is_locked = job[8].as_str().is_some_and(|by| by.starts_with("pool-"));
        assert!(is_locked || job == failed, "{job}");
    }
    assert_eq!(ours.1.to_string().matches("told").count(), 2, "{}", ours.1);
    // A stop that was asked for is no failure. Node's worker ends itself by the signal that it has handled.
    assert_eq!((ours.0.status.code(), node.0.status.signal()), (Some(0), Some(15)), "{:?} {:?}", ours.0, node.0);
}

/// The second signal. Node's worker takes that for a failure of the job; ours releases it as if it had not started.
#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_still_hangs_is_abandoned_at_the_second_signal() {
    let after = async |command_line: CommandLine| {
        let (db, worker) =
            with_hanging_jobs(command_line, r#"select graphile_worker.add_job('hangs', '{"then": "stays"}')"#).await;
        worker.signal("TERM");
        db.until("select count(*) = 1 from noted where value ? 'told'").await;
        if command_line == NODES {
            // Before that, it does not listen.
            worker.says("Switching to forceful handler").await;
        }
        worker.signal("TERM");
        let ended: Ended = worker.ended().await;
        let job = db
            .value(
                "select json_build_object('attempts', attempts, 'locked_by', locked_by, 'last_error', last_error,
                                          'waits', run_at > now())
                 from graphile_worker.jobs",
            )
            .await;
        (ended, job)
    };
    let (ours, node) = tokio::join!(after(OURS), after(NODES));
    assert_eq!(
        node.1,
        json!({"attempts": 1, "locked_by": null, "last_error": "Forced worker shutdown due to SIGTERM", "waits": true})
    );
    assert_eq!(
        ours.1,
        json!({"attempts": 0, "locked_by": null, "last_error": "the worker was shut down before the job finished", "waits": true})
    );
    // As a shell would say it of who died by the signal.
    assert_eq!((ours.0.status.code(), node.0.status.signal()), (Some(128 + 15), Some(15)), "{:?} {:?}", ours.0, node.0);
}

/// Runs what there is as often as it takes: jobs of dead workers are unlocked, and what waits for its next attempt is due.
async fn drain(command_line: CommandLine, db: &Db) -> Vec<(Ended, Value)> {
    let mut rounds = Vec::new();
    while db.value("select count(*) from graphile_worker.jobs").await != json!(0) {
        assert!(rounds.len() < 10, "{rounds:?}");
        let ended = command_line.runs_once(db, &project("realistic")).await;
        let errors = db.value("select json_agg(last_error order by id) from graphile_worker.jobs").await;
        rounds.push((ended, errors));
        db.run(
            "select graphile_worker.force_unlock_workers(array(select locked_by from graphile_worker.jobs where locked_by is not null));
             update graphile_worker._private_jobs set run_at = created_at",
        )
        .await;
    }
    rounds
}

/// Node's worker dies with the task, and an operator has to start it again and to unlock its job, which has no error. Under
/// ours only the host dies: the job has failed with a sentence, and all others are done.
#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_ends_its_process_ends_nodes_worker_and_not_ours() {
    const EXITING: &str = r#"
      select graphile_worker.add_job('hello', '{"name": "before"}', priority := -1);
      select graphile_worker.add_job('exits', json_build_object('by', by))
      from unnest(array['exit', 'abort', 'uncaught error', 'unhandled rejection']) as by;
      select graphile_worker.add_job('hello', '{"name": "after"}', priority := 1);
    "#;
    let after = async |command_line: CommandLine| {
        let db = database(EXITING).await;
        (drain(command_line, &db).await, noted(&db).await)
    };
    let (ours, node) = tokio::join!(after(OURS), after(NODES));
    assert_eq!(ours.1, node.1, "in the end, the same was done");
    assert_eq!(ours.1.as_array().map(Vec::len), Some(2 + 4 * 2), "each was tried twice: {}", ours.1);

    let how = |rounds: &[(Ended, Value)]| {
        rounds.iter().map(|(ended, _)| (ended.status.code(), ended.status.signal())).collect::<Vec<_>>()
    };
    let node_ended = [(Some(3), None), (None, Some(6)), (Some(1), None), (Some(1), None), (Some(0), None)];
    assert_eq!(how(&node.0), node_ended);
    assert!(node.0.iter().all(|(_, errors)| !errors.to_string().contains('"')), "{:?}", node.0);

    assert_eq!(how(&ours.0), [(Some(0), None), (Some(0), None)], "{:?}", ours.0);
    let errors: Vec<&str> = ours.0[0].1.as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    let sentences = ["exit code 3", "signal 6", "nobody catches me", "nobody waits for me"];
    assert_eq!(errors.len(), sentences.len(), "{errors:?}");
    for (error, part) in errors.iter().zip(sentences) {
        assert!(error.starts_with("the host process of this task") && error.contains(part), "{error}");
    }
}
