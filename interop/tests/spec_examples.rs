//! Every example in JavaScript or TypeScript of the specification (`5-graphile-worker.md`, the only page that has any), run
//! by Node's command line and by ours. Tasks are files in `projects/spec`; what uses Node's worker as a library is in
//! `node/library.cjs`, and adds jobs for both.
//!
//! | example | shown by |
//! | --- | --- |
//! | Quickstart: CLI, `tasks/hello.js`, `npx graphile-worker -c`, `add_job` | [`the_quickstart_of_the_command_line`] |
//! | the same, the ways to name the database | [`the_ways_to_name_the_database`] |
//! | Quickstart: library, `run` and `quickAddJob` | [`the_quickstart_of_the_library`] |
//! | `Runner` object, `runner.addJob` | [`what_nodes_library_adds_runs_under_both`] |
//! | `Runner` object, `runner.events.on("job:success")` | [`the_quickstart_of_the_library`] waits for it under Node; ours has hooks in Rust, and its log |
//! | `WorkerEvents` (a type) | nothing to run; hooks in Rust, `tests/it/hooks.rs` of the library |
//! | queueing jobs, `workerUtils.migrate()` | [`what_nodes_library_adds_runs_under_both`] |
//! | `makeWorkerUtils`, `quickAddJob` | [`what_nodes_library_adds_runs_under_both`] |
//! | `addJob("task_2", …)` | [`tasks_of_the_examples_do_the_same`], `tasks/adds.js` |
//! | `AddJobFunction`, `TaskSpec` (types) | [`what_nodes_library_adds_runs_under_both`] from outside, `projects/edges/tasks/adds.js` from a task |
//! | Logger, `logFactory` | [`the_quickstart_of_the_library`]: what its scope has, ours has in a line of `--log-format json` |
//! | `helpers.logger`, `scope` | `task_edges.rs` |
//! | `tasks/task_1.js`, `tasks/task_2.js` | [`tasks_of_the_examples_do_the_same`] |
//! | `helpers.withPgClient` | [`tasks_of_the_examples_do_the_same`], `tasks/one.js` |
//! | administration, `completeJobs`, `permanentlyFailJobs`, `rescheduleJobs` | `node_worker.rs`, by `node/utils.cjs`: they call functions of the schema, which is ours |
//! | Forbidden flags, `run({ forbiddenFlags })` | library only, under Node as under ours: `tests/it/worker.rs` of the library |

#![allow(missing_docs)]

use graphile_worker_interop::{CommandLine, Db, project, run_node};
use serde_json::{Value, json};

const OURS: CommandLine = CommandLine::Ours(env!("CARGO_BIN_EXE_ours"));
const NODES: [CommandLine; 2] = [CommandLine::Nodes("graphile-worker"), CommandLine::Nodes("graphile-worker-0.17")];

async fn database() -> Db {
    let db = Db::ours().await;
    db.run("create table noted (task text, value jsonb)").await;
    db
}

/// What was noted, and what is left.
async fn outcome(db: &Db) -> Value {
    db.value(
        "select json_build_array(
           (select json_agg(noted order by task, value) from noted),
           (select json_agg(json_build_array(task_identifier, queue_name, priority, attempts, max_attempts, key, revision, flags,
              last_error, case when run_at > now() then run_at end) order by id) from graphile_worker.jobs))",
    )
    .await
}

/// The lines of a log that belong to a job, as ours names it: Node's names the worker, too.
fn job_lines(log: &str) -> Vec<String> {
    let nodes = |line: &str| {
        let (task, rest) = line.strip_prefix("[job(")?.split_once(": ")?.1.split_once('{')?;
        let (id, rest) = rest.split_once("})] ")?;
        Some(format!("[job {id} {task}] {rest}"))
    };
    let ours = |line: &str| line.starts_with("[job ").then(|| line.to_owned());
    let of_jobs = log.lines().filter_map(|line| ours(line).or_else(|| nodes(line)));
    of_jobs.filter(|line| !line.contains(": job ")).collect()
}

/// A worker that runs when the job is added, and says hello.
#[tokio::test(flavor = "multi_thread")]
async fn the_quickstart_of_the_command_line() {
    for command_line in [OURS].into_iter().chain(NODES) {
        let db = database().await;
        let worker = command_line.start(&db, &project("spec"), &["-c", db.url()]);
        db.until(
            "select count(*) > 0 from pg_stat_activity where datname = current_database() and query ilike 'listen%'",
        )
        .await;
        db.run("select graphile_worker.add_job('hello', json_build_object('name', 'Bobby Tables'))").await;
        worker.says("] INFO: Hello, Bobby Tables\n").await;
        db.until("select count(*) = 0 from graphile_worker.jobs").await;
        assert_eq!(job_lines(&worker.log()), ["[job 1 hello] INFO: Hello, Bobby Tables"], "{command_line:?}");
        worker.signal("TERM");
        worker.ended().await;
    }
}

/// A name, a URL, a URL without a server, variables: whatever leads the worker to its database leads its tasks there too.
/// Only not for Node's own worker the bare name that the quickstart begins with: its driver reads it as another server.
#[tokio::test(flavor = "multi_thread")]
async fn the_ways_to_name_the_database() {
    const PASSWORD: &str = "p@ss/w:rd %";
    const ENCODED: &str = "p%40ss%2Fw%3Ard%20%25";
    for command_line in [OURS, NODES[0]] {
        let db = database().await;
        let (server, name) = db.url().rsplit_once('/').expect("a URL");
        let (host, port) = server.rsplit_once('@').and_then(|(_, server)| server.split_once(':')).expect("a server");
        let role = format!("role_of_{name}");
        db.run(&format!("create role {role} superuser login password '{PASSWORD}'")).await;
        let (url, without_server) =
            (format!("postgres://{role}:{ENCODED}@{host}:{port}/{name}"), format!("postgres:///{name}"));
        let variables =
            [("DATABASE_URL", ""), ("PGHOST", host), ("PGPORT", port), ("PGUSER", &role), ("PGPASSWORD", PASSWORD)];
        let with_name = [&variables[..], &[("PGDATABASE", name)]].concat();
        let ways = [
            (&["--once", "-c", &url][..], &[("DATABASE_URL", "")][..]),
            (&["--once"], &[("DATABASE_URL", &url)]),
            (&["--once", "-c", name], &variables),
            (&["--once", "-c", &without_server], &variables),
            (&["--once"], &with_name),
        ];
        for (place, (arguments, environment)) in ways.into_iter().enumerate() {
            if command_line != OURS && arguments.contains(&name) {
                continue;
            }
            db.run("truncate noted; select graphile_worker.add_job('one')").await;
            let ended = command_line.start_with(&db, &project("spec"), arguments, environment).ended().await;
            assert_eq!(
                db.value("select value from noted").await,
                json!({"one": 1}),
                "{place}, {command_line:?}: {ended:?}"
            );
        }
        db.run(&format!("drop role {role}")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_of_the_examples_do_the_same() {
    let after = async |command_line: CommandLine| {
        let db = database().await;
        db.run(
            r#"select graphile_worker.add_job('task_1', '{"any": ["thing", 1]}');
               select graphile_worker.add_job('task_2', '{"any": ["thing", 2]}');
               select graphile_worker.add_job('one');
               select graphile_worker.add_job('adds');
               select graphile_worker.add_job('task_1_after', priority := 1)"#,
        )
        .await;
        let debug = [("GRAPHILE_LOGGER_DEBUG", "1")];
        let ended = command_line.start_with(&db, &project("spec"), &["--once"], &debug).ended().await;
        assert!(ended.status.success(), "{command_line:?}: {ended:?}");
        (outcome(&db).await, job_lines(&ended.log))
    };
    let ours = after(OURS).await;
    assert_eq!(ours.0[0].as_array().map(Vec::len), Some(3), "{ours:?}");
    assert_eq!(
        ours.1,
        [r#"[job 2 task_2] DEBUG: Received {"any":["thing",2]}"#, r#"[job 6 task_2] DEBUG: Received {"foo":"bar"}"#]
    );
    for node in NODES {
        assert_eq!(ours, after(node).await, "{node:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nodes_library_adds_runs_under_both() {
    let after = async |package: &str, command_line: CommandLine| {
        let db = database().await;
        run_node("library.cjs", &[package, db.url(), "adds"]);
        let ended = command_line.runs_once(&db, &project("spec")).await;
        assert!(ended.status.success(), "{command_line:?}: {ended:?}");
        (outcome(&db).await, job_lines(&ended.log))
    };
    for package in ["graphile-worker", "graphile-worker-0.17"] {
        let ours = after(package, OURS).await;
        assert_eq!(ours, after(package, CommandLine::Nodes(package)).await, "{package}");
        assert_eq!(ours.0[0].as_array().map(Vec::len), Some(3), "{ours:?}");
        assert_eq!(ours.0[1].as_array().map(Vec::len), Some(1), "one is not due yet: {ours:?}");
    }
}

/// Node's library runs the task itself, and gives its log to a function; ours runs the file and writes objects. Who, how
/// grave and what are the same, by other names.
#[tokio::test(flavor = "multi_thread")]
async fn the_quickstart_of_the_library() {
    let hello = |line: &&Value| line["message"] == "Hello, Bobby Tables";
    let lines = |text: &str| text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect::<Vec<Value>>();
    let db = database().await;
    let said = lines(&run_node("library.cjs", &["graphile-worker", db.url(), "runs"]));
    let of_node = said.iter().find(hello).expect("hello");
    assert!(said.iter().any(|line| line["message"] == "a worker has done job 1"), "{said:?}");

    let db = database().await;
    db.run("select graphile_worker.add_job('hello', json_build_object('name', 'Bobby Tables'))").await;
    let ended = OURS.start(&db, &project("spec"), &["--once", "--log-format", "json"]).ended().await;
    let said = lines(&ended.log);
    let of_ours = said.iter().find(hello).expect("hello");

    let scope = &of_node["scope"];
    assert_eq!(json!(of_ours["level"].as_str().map(str::to_lowercase)), of_node["level"]);
    assert_eq!(of_ours["label"], scope["label"]);
    assert_eq!(of_ours["task_identifier"], scope["taskIdentifier"]);
    assert_eq!(json!(of_ours["job_id"].to_string()), scope["jobId"]);
    assert!(of_ours["worker_id"].is_string() && scope["workerId"].is_string(), "{of_ours} {scope}");
}
