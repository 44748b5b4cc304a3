//! What tasks may do that is unusual, under Node's command line and under ours: one folder, `projects/edges`, and all that
//! its tasks note, log and leave. Where the two differ, a test says how.

#![allow(missing_docs)]

use graphile_worker_interop::{CommandLine, Db, project};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use tokio::sync::OnceCell;

const JOBS: &str = r#"
  create table noted (task text, value jsonb);
  select graphile_worker.add_job('describes');
  select graphile_worker.add_job('describes', queue_name := 'q', job_key := 'described', priority := 4, max_attempts := 9, flags := array['f']);
  select graphile_worker.add_job(task) from unnest(array['adds', 'adds_wrongly', 'queries', 'retries', 'logs', 'throws_at_once']) as task;

  select graphile_worker.add_job('throws', json_build_object('what', what)) from unnest(array[
    'error', 'type_error', 'own class', 'with a cause', 'many lines', 'aggregate', 'without a message', 'message of another type',
    'undefined', 'null', 'text', 'empty text', 'number', 'object', 'object without a message']) as what;
  select graphile_worker.add_job('throws', '{"what": "error", "rejects": true}');
  select graphile_worker.add_job('returns', json_build_object('what', what)) from unnest(array[
    'nothing', 'number', 'null', 'false', 'list', 'promise of a list', 'thenable', 'thenable that fails',
    'error that is not thrown', 'promise in a promise']) as what;

  select graphile_worker.add_job('batch', payload) from unnest(array[
    '[{"as": "fine"}, {"as": "fails", "n":   1}, {"as": "promise"}, {"as": "fails with text"}, {"as": "fails with nothing"}]',
    '[{"as": "fine"}, {"as": "promise"}]',
    '[{"whole": "too few"}, {"n": 1}]',
    '[{"whole": "nothing"}]',
    '[{"whole": "throws"}]',
    '[{"whole": "not a list"}]',
    '[]']::json[]) as payload;

  select graphile_worker.add_job('payload', payload) from unnest(array[
    'null', 'true', '0', '-0', '1.50', '1e400', '9007199254740993', '"text"', '"zażółć 🦀 \u0041 \\n"', '[]',
    '[1, [2, {"a": null}]]', '{"b": 1, "a": 2, "b": 3}', '{"__proto__": {"x": 1}}', '{"constructor": 1}']::json[]) as payload;

  select graphile_worker.add_job(file) from unnest(array[
    'compiled', 'folder/index', 'linked', 'modern/old', 'modern/plain', 'named_too', 'plain_default', 'same', 'typed', 'waits_to_load',
    '.dotted/in', '.hidden', 'linked_folder/linked_task', 'modern/package', 'two', 'two.dots', 'with space']) as file;
"#;

/// What came of the jobs.
struct Run {
    noted: Value,
    left: Value,
    log: String,
}

impl Run {
    async fn of(command_line: CommandLine) -> Run {
        let db = Db::ours().await;
        db.run(JOBS).await;
        // On a slow machine, a second attempt would begin before the last first one has ended.
        db.run("update graphile_worker._private_jobs set max_attempts = 1").await;
        let worker = command_line.start_with(&db, &project("edges"), &["--once"], &[("GRAPHILE_LOGGER_DEBUG", "1")]);
        let ended = worker.ended().await;
        assert!(ended.status.success(), "{command_line:?}: {ended:?}");
        Run {
            noted: db
                .value(
                    "select json_object_agg(task, list)
                     from (select task, json_agg(value order by value) as list from noted group by task) as tasks",
                )
                .await,
            left: db
                .value(
                    "select json_object_agg(task_identifier, list) from (
                       select task_identifier, json_agg(json_build_array(
                         (select payload::jsonb from graphile_worker._private_jobs as p where p.id = jobs.id),
                         queue_name, priority, attempts, max_attempts, key, revision, flags, locked_by, last_error
                       ) order by jobs.id) as list
                       from graphile_worker.jobs group by task_identifier
                     ) as tasks",
                )
                .await,
            log: ended.log,
        }
    }

    /// What tasks of this name noted.
    fn noted(&self, task: &str) -> &Value {
        &self.noted[task]
    }

    /// Payloads of the jobs that failed, with the first line of why: ours also say where.
    fn failures(&self, task: &str) -> Vec<(Value, String)> {
        let jobs = self.left[task].as_array().cloned().unwrap_or_default();
        let failed = jobs.into_iter().filter(|job| job[3] == 1 && job[8].is_null());
        let first_line = |error: &Value| error.as_str().and_then(|error| error.lines().next()).unwrap_or("").to_owned();
        failed.map(|job| (job[0].clone(), first_line(&job[9]))).collect()
    }

    /// Names of tasks that no worker had.
    fn not_run(&self) -> BTreeSet<&str> {
        let left = self.left.as_object().expect("an object");
        left.iter().filter(|(_, jobs)| jobs[0][3] == 0).map(|(task, _)| &**task).collect()
    }

    /// The lines that belong to jobs of this task, as level and message.
    fn logged(&self, task: &str) -> BTreeSet<(String, String)> {
        let (of_node, of_ours) = (format!(": {task}{{"), format!(" {task}] "));
        let rest = |line: &str| match line.strip_prefix("[job(") {
            Some(line) => {
                line.split_once(")] ").filter(|(begin, _)| begin.contains(&of_node)).map(|(_, rest)| rest.to_owned())
            }
            None => line.strip_prefix("[job ")?.split_once(&of_ours).map(|(_, rest)| rest.to_owned()),
        };
        let lines: Vec<String> = self.log.lines().filter_map(rest).collect();
        lines
            .iter()
            .filter_map(|line| line.split_once(": "))
            .map(|(level, message)| (level.to_owned(), message.to_owned()))
            .collect()
    }
}

/// One run each for all tests: Node takes its time to start.
static RUNS: OnceCell<[Run; 3]> = OnceCell::const_new();

/// Ours, Node's of today, and the one before that.
async fn runs() -> &'static [Run; 3] {
    let run = |command_line| tokio::spawn(Run::of(command_line));
    RUNS.get_or_init(async || {
        let [ours, node, older] = [
            run(CommandLine::Ours(env!("CARGO_BIN_EXE_ours"))),
            run(CommandLine::Nodes("graphile-worker")),
            run(CommandLine::Nodes("graphile-worker-0.17")),
        ];
        [ours.await.expect("a run"), node.await.expect("a run"), older.await.expect("a run")]
    })
    .await
}

/// Without what only Node shows: the number that the database gives a task.
fn without_task_id(noted: &Value) -> Value {
    let text = noted.to_string().replace(r#","task_id":"number""#, "");
    serde_json::from_str(&text).expect("JSON")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_finds_the_same_helpers_and_the_same_job() {
    let [ours, node, older] = runs().await;
    for node in [node, older] {
        assert_eq!(*ours.noted("describes"), without_task_id(node.noted("describes")));
        assert_eq!(ours.noted("queries"), node.noted("queries"));
        assert_eq!(ours.noted("retries"), node.noted("retries"));
    }
    assert_eq!(ours.noted("describes").as_array().map(Vec::len), Some(2));
    assert_eq!(ours.noted["retries"][0]["serialization"], 3, "it was tried again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_adds_the_same_jobs_and_gets_the_same_answer() {
    let [ours, node, older] = runs().await;
    for node in [node, older] {
        assert_eq!(*ours.noted("adds"), without_task_id(node.noted("adds")));
        for added in ["nobodys", "other"] {
            assert_eq!(ours.left[added], node.left[added]);
        }
    }
    assert_eq!(ours.left["nobodys"].as_array().map(Vec::len), Some(14));
}

/// The message and the code are the database's. Only of a number that is none of its own ours says so itself.
#[tokio::test(flavor = "multi_thread")]
async fn invalid_jobs_are_rejected_with_the_same_code() {
    let [ours, node, older] = runs().await;
    let refusals = |run: &Run| -> Vec<Value> {
        let all = run.noted("adds_wrongly").as_array().cloned().expect("a list");
        assert!(all.iter().all(|refusal| refusal["failed"] == true), "{all:?}");
        all.into_iter().filter(|refusal| refusal["what"] != "too much").collect()
    };
    assert_eq!(refusals(ours), refusals(node));
    assert_eq!(refusals(ours), refusals(older));
    let codes: BTreeSet<_> =
        refusals(ours).iter().filter_map(|refusal| refusal["code"].as_str().map(str::to_owned)).collect();
    assert_eq!(codes, ["GWBID", "GWBJK", "GWBKM", "GWBMA", "GWBQN"].map(str::to_owned).into());
}

#[tokio::test(flavor = "multi_thread")]
async fn payloads_arrive_the_same() {
    let [ours, node, older] = runs().await;
    assert_eq!(ours.noted("payload"), node.noted("payload"));
    assert_eq!(ours.noted("payload"), older.noted("payload"));
    assert_eq!(ours.noted("payload").as_array().map(Vec::len), Some(14));
}

/// What is thrown and no error: Node's worker does not keep it, ours says what it was.
const THROWN_AND_NO_ERROR: [(&str, &str); 6] = [
    ("undefined", "the task threw a value that is not an error: undefined"),
    ("null", "the task threw a value that is not an error: null"),
    ("text", "only text"),
    ("empty text", "the task threw a value that is not an error: ''"),
    ("number", "the task threw a value that is not an error: 7"),
    ("object without a message", "the task threw a value that is not an error: { code: 1 }"),
];

#[tokio::test(flavor = "multi_thread")]
async fn jobs_fail_and_complete_for_the_same_reasons() {
    let [ours, node, older] = runs().await;
    let expected: Vec<(Value, String)> = node
        .failures("throws")
        .into_iter()
        .map(|(payload, error)| match THROWN_AND_NO_ERROR.iter().find(|(what, _)| payload["what"] == *what) {
            Some((_, said)) => {
                assert_eq!(error, "An error occurred");
                (payload, (*said).to_owned())
            }
            None => (payload, error),
        })
        .collect();
    assert_eq!(ours.failures("throws"), expected);
    assert_eq!(expected.len(), 16);
    assert_eq!(node.failures("throws"), older.failures("throws"));
    for task in ["throws_at_once", "returns"] {
        assert_eq!(ours.failures(task), node.failures(task));
        assert_eq!(ours.failures(task), older.failures(task));
    }
    assert_eq!(
        ours.failures("returns").len(),
        2,
        "whatever is returned, the job is done, unless it is a promise that fails"
    );
    let causes = ours.left["throws"].to_string();
    assert!(causes.contains("caused by: inner") && causes.contains("caused by: two"), "{causes}");
}

/// The same items remain. Node's worker lists all errors, ours counts them and tells the first.
#[tokio::test(flavor = "multi_thread")]
async fn the_same_items_of_a_batch_are_retried() {
    let [ours, node, older] = runs().await;
    let remain = |run: &Run| run.failures("batch").into_iter().map(|(payload, _)| payload).collect::<Vec<_>>();
    assert_eq!(remain(ours), remain(node));
    assert_eq!(remain(ours), remain(older));
    assert_eq!(remain(ours).len(), 2);
    let errors = |run: &Run| run.failures("batch").into_iter().map(|(_, error)| error).collect::<Vec<_>>();
    assert_eq!(errors(ours), ["3 of 5 items failed, the first with: no 1", "all of it"]);
    assert_eq!(errors(node), ["Batch failures:", "all of it"]);
}

/// Modules and CommonJS, links, `index.js`, what compilers make, a folder with a `package.json` of its own; and what is no
/// task: dotfiles, links to folders, names with spaces or a second dot.
#[tokio::test(flavor = "multi_thread")]
async fn the_same_files_are_tasks_under_the_same_names() {
    let [ours, node, older] = runs().await;
    assert_eq!(ours.noted("loaded"), node.noted("loaded"));
    assert_eq!(ours.not_run(), node.not_run());
    assert_eq!(ours.noted("loaded").as_array().map(Vec::len), Some(10));
    // Before 0.18, TypeScript was nothing that Node's worker loads.
    let with_typescript: BTreeSet<&str> = ours.not_run().union(&["typed"].into()).copied().collect();
    assert_eq!(with_typescript, older.not_run());
}

/// In ours all of it has its job and a level; Node's worker leaves the console alone. Lines with more to them than a
/// message show it here, and do not there.
#[tokio::test(flavor = "multi_thread")]
async fn what_tasks_log_has_its_level_and_its_job() {
    let [ours, node, older] = runs().await;
    let told = |run: &Run| -> BTreeSet<(String, String)> {
        let lines = run.logged("logs").into_iter().filter(|(_, message)| message.contains(" told"));
        lines.map(|(level, message)| (level.replace("WARNING", "WARN"), message)).collect()
    };
    let line = |level: &str, message: &str| (level.to_owned(), message.to_owned());
    let of_node = [
        line("ERROR", "an error is told"),
        line("WARN", "a warning is told"),
        line("INFO", "what happens is told"),
        line("DEBUG", "details are told"),
        line("INFO", "half of \u{fffd} is told"),
        line("INFO", "a part of it is told"),
    ];
    assert_eq!(told(node), of_node.clone().into());
    assert_eq!(told(older), of_node.clone().into());
    let of_ours = of_node.map(|(level, message)| match &*message {
        "what happens is told" => (level, format!("{message} (meta: {})", json!({"with": "meta"}))),
        "a part of it is told" => (level, format!("{message} (scope: {})", json!({"step": 2}))),
        _ => (level, message),
    });
    assert_eq!(told(ours), of_ours.into());

    let heard = [
        ("ERROR", "console.error is heard"),
        ("WARN", "console.warn is heard"),
        ("INFO", "console.log is heard"),
        ("INFO", "console.info is heard"),
        ("DEBUG", "console.debug is heard"),
        ("INFO", "stdout is heard"),
        ("WARN", "stderr is heard"),
    ];
    for (level, message) in heard {
        assert!(ours.logged("logs").contains(&line(level, message)), "{message}: {}", ours.log);
        assert!(node.log.lines().any(|line| line == message), "{message}: {}", node.log);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_have_as_many_connections_as_the_option_allows() {
    for command_line in [CommandLine::Ours(env!("CARGO_BIN_EXE_ours")), CommandLine::Nodes("graphile-worker")] {
        let db = Db::ours().await;
        db.run(r#"select graphile_worker.add_job('connects', '{"times": 12}')"#).await;
        let ended = command_line.start(&db, &project("edges"), &["--once", "-m", "15"]).ended().await;
        assert_eq!(
            db.value("select count(*) from graphile_worker.jobs").await,
            json!(0),
            "{command_line:?}: {ended:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_folder_itself_may_be_a_link() {
    for command_line in [CommandLine::Ours(env!("CARGO_BIN_EXE_ours")), CommandLine::Nodes("graphile-worker")] {
        let db = Db::ours().await;
        db.run("create table noted (task text, value jsonb); select graphile_worker.add_job('one')").await;
        let ended = command_line.runs_once(&db, &project("linked")).await;
        assert_eq!(db.value("select value from noted").await, json!({"one": 1}), "{command_line:?}: {ended:?}");
    }
}

/// A mistake in one file keeps Node's worker from starting; ours names it and runs the others.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_does_not_load_stops_node_and_not_us() {
    const DONE: &str = "select count(*) = 0 from graphile_worker.jobs";
    let with_a_job = async || {
        let db = Db::ours().await;
        db.run("select graphile_worker.add_job('fine')").await;
        db
    };
    let db = with_a_job().await;
    let node = CommandLine::Nodes("graphile-worker").runs_once(&db, &project("broken")).await;
    assert_eq!((node.status.code(), db.value(DONE).await), (Some(1), json!(false)), "{node:?}");
    assert!(node.log.contains("imports_nothing.mjs"), "the first of them: {node:?}");

    let db = with_a_job().await;
    let ours = CommandLine::Ours(env!("CARGO_BIN_EXE_ours")).runs_once(&db, &project("broken")).await;
    assert_eq!((ours.status.code(), db.value(DONE).await), (Some(0), json!(true)), "{ours:?}");
    for (file, why) in [
        ("imports_nothing.mjs", "not_there.mjs"),
        ("mistake.js", "missing )"),
        ("no_function.js", "expected a function"),
        ("throws.js", "not today"),
    ] {
        let named = ours.log.lines().any(|line| line.contains(&format!("file: {file}")) && line.contains(why));
        assert!(named, "{file}: {}", ours.log);
    }
}
