//! JavaScript and Python files as tasks, run by the real Node and Python: what they are given, what becomes of what they
//! do, and that a host that dies, hangs or grows takes nothing with it but the jobs in it.

use crate::support::{Db, Log, Started, until};
use graphile_worker::{JobSpec, TaskOptions, Worker, WorkerOptions};
use graphile_worker_scripts::{HostOptions, TasksDir};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Duration;

/// A project with a folder of tasks, gone after the test. Tasks leave what they have to say in files beside it.
pub(crate) struct Project(pub(crate) PathBuf);

impl Project {
    pub(crate) fn new() -> Project {
        static NUMBER: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("graphile_worker_hosts_{}_{number}", std::process::id()));
        std::fs::create_dir_all(path.join("tasks")).unwrap();
        Project(path)
    }

    pub(crate) fn tasks(&self) -> PathBuf {
        self.0.join("tasks")
    }

    /// A task; in it, `OUT` is the project's folder, and `note(file, value)` adds a line of JSON to a file there.
    pub(crate) fn task(&self, name: &str, body: &str) -> &Project {
        let out = self.0.display();
        let text = match name.rsplit('.').next().unwrap() {
            "py" => format!(
                "import json, os, sys, time\nOUT = '{out}'\ndef note(file, value):\n  with open(OUT + '/' + file, 'a') as f: f.write(json.dumps(value, default=str) + '\\n')\n{body}\n"
            ),
            "mjs" => format!(
                "import fs from 'node:fs';\nconst OUT = '{out}';\nconst note = (file, value) => fs.appendFileSync(OUT + '/' + file, JSON.stringify(value) + '\\n');\n{body}\n"
            ),
            _ => format!(
                "const OUT = '{out}';\nconst note = (file, value) => require('fs').appendFileSync(OUT + '/' + file, JSON.stringify(value) + '\\n');\n{body}\n"
            ),
        };
        self.file(&format!("tasks/{name}"), &text)
    }

    pub(crate) fn file(&self, name: &str, text: &str) -> &Project {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
        self
    }

    /// An environment of its own for Python, with no packages in it.
    pub(crate) fn virtual_environment(&self) -> PathBuf {
        let folder = self.0.join(".venv");
        let mut make = std::process::Command::new("python3");
        let made = make.args(["-m", "venv", "--without-pip"]).arg(&folder).status().unwrap();
        assert!(made.success());
        folder
    }

    /// What was noted in a file, so far.
    pub(crate) fn notes(&self, file: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.0.join(file)).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub(crate) async fn noted(&self, file: &str, count: usize) -> Vec<Value> {
        let what = format!("{file} has {count} lines");
        until(&what, async || Some(self.notes(file)).filter(|notes| notes.len() >= count)).await
    }
}

impl Drop for Project {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn options(db: &Db, project: &Project) -> WorkerOptions {
    WorkerOptions::default()
        .pg_pool(db.pool.clone())
        .listen_os_shutdown_signals(false)
        .concurrency(8)
        .poll_interval(Duration::from_secs(3600))
        .task_source(TasksDir::new(project.tasks()))
}

pub(crate) async fn run_once(db: &Db, project: &Project) {
    options(db, project).init().await.unwrap().run_once().await.unwrap();
}

pub(crate) async fn jobs(db: &Db) -> Vec<Value> {
    db.rows("select task_identifier, attempts, last_error, queue_name, priority, max_attempts, key from graphile_worker.jobs order by id").await
}

pub(crate) async fn last_error(db: &Db) -> String {
    db.value("select last_error from graphile_worker.jobs").await.as_str().unwrap().to_owned()
}

pub(crate) async fn failed(db: &Db, count: usize) -> Vec<String> {
    let what = format!("{count} jobs have failed");
    let sql = "select last_error from graphile_worker.jobs where last_error is not null order by id";
    until(&what, async || {
        let rows = db.rows(sql).await;
        (rows.len() >= count).then(|| rows.iter().map(|row| row["last_error"].as_str().unwrap().to_owned()).collect())
    })
    .await
}

pub(crate) fn is_alive(pid: &Value) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with(['Z', 'X']))
}

pub(crate) async fn gone(pid: &Value) {
    until("the process is gone", async || (!is_alive(pid)).then_some(())).await;
}

#[tokio::test]
async fn commonjs_and_modules_get_the_payload_and_the_job() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("common.js", "module.exports = async (payload, { job }) => note('common', [payload, job]);");
    project.task("named.cjs", "exports.default = (payload) => { note('named', payload) };");
    project.task(
        "sub/module.mjs",
        "export default async (payload, helpers) => note('module', [payload, Object.keys(helpers)]);",
    );
    project.file("tasks/package.json", "{}");
    db.add_job("'common', '{\"a\":\n 1}', job_key := 'k', priority := -3, max_attempts := 7, queue_name := 'q', run_at := '2024-02-03T04:05:06.789Z'").await;
    db.add_job("'named', '[1, 2]'").await;
    db.add_job("'sub/module', '\"text\"'").await;
    run_once(&db, &project).await;
    assert_eq!(jobs(&db).await, [] as [Value; 0]);
    let common = &project.notes("common")[0];
    assert_eq!(common[0], json!({"a": 1}));
    let job = &common[1];
    for (name, value) in [
        ("id", json!("1")),
        ("task_identifier", json!("common")),
        ("payload", json!({"a": 1})),
        ("key", json!("k")),
        ("priority", json!(-3)),
        ("attempts", json!(1)),
        ("max_attempts", json!(7)),
        ("run_at", json!("2024-02-03T04:05:06.789Z")),
        ("last_error", json!(null)),
        ("revision", json!(0)),
    ] {
        assert_eq!(job[name], value, "{name} of {job}");
    }
    assert!(job["locked_by"].as_str().unwrap().starts_with("rs-"), "{job}");
    assert_eq!(project.notes("named"), [json!([1, 2])]);
    let keys = [
        "job",
        "logger",
        "abortSignal",
        "abortPromise",
        "addJob",
        "addJobs",
        "getQueueName",
        "withPgClient",
        "query",
        "debug",
    ];
    assert_eq!(project.notes("module"), [json!(["text", keys])]);
}

#[tokio::test]
async fn an_error_arrives_with_its_message_and_where_it_was_thrown() {
    let db = Db::installed().await;
    let project = Project::new();
    project
        .task("throws.js", "module.exports = async () => { throw new Error('boom', { cause: new Error('spark') }); };");
    project.task("sync.js", "module.exports = () => { throw new TypeError('at once'); };");
    project.task("text.js", "module.exports = () => Promise.reject('only text');");
    project.task("python.py", "def task(payload, helpers):\n  raise ValueError('snake')");
    for task in ["throws", "sync", "text", "python"] {
        db.add_job(&format!("'{task}'")).await;
    }
    run_once(&db, &project).await;
    let errors: Vec<String> =
        jobs(&db).await.iter().map(|job| job["last_error"].as_str().unwrap().to_owned()).collect();
    let lines: Vec<&str> = errors[0].lines().collect();
    assert_eq!(lines[0], "boom");
    assert!(lines[1].trim().starts_with("at ") && lines[1].contains("tasks/throws.js:3:"), "{}", errors[0]);
    assert!(lines.contains(&"caused by: spark"), "{}", errors[0]);
    assert!(!errors[0].contains("[eval"), "nothing of the host: {}", errors[0]);
    assert!(errors[1].starts_with("at once\n    at module.exports"), "{}", errors[1]);
    assert_eq!(errors[2], "only text");
    assert!(
        errors[3].starts_with("snake\nTraceback") && errors[3].contains("tasks/python.py\", line 6"),
        "{}",
        errors[3]
    );
    assert!(errors[3].ends_with("ValueError: snake"), "{}", errors[3]);
}

#[tokio::test]
async fn half_a_character_costs_nobody_the_host() {
    let db = Db::installed().await;
    let project = Project::new();
    project
        .task("half.js", "module.exports = async () => { console.log('\\ud83e'); throw new Error('half \\ud83e'); };");
    project.task("half_py.py", "def task(payload, helpers):\n  print('\\udc80')\n  raise ValueError('half \\udc80')");
    db.add_job("'half'").await;
    db.add_job("'half_py'").await;
    run_once(&db, &project).await;
    let errors = failed(&db, 2).await;
    assert!(errors.iter().all(|error| error.starts_with("half \u{fffd}")), "{errors:?}");
}

#[tokio::test]
async fn the_items_of_a_batch_that_failed_remain() {
    let db = Db::installed().await;
    let project = Project::new();
    let body =
        "module.exports = (items) => items.map(async (item) => { if (item.bad) throw new Error(`no ${item.n}`); });";
    project.task("batch.js", body);
    project.task("short.js", "module.exports = (items) => [Promise.resolve()];");
    project.task("batch_py.py", "async def one(item):\n  if item['bad']: raise ValueError('no %d' % item['n'])\nasync def task(items, helpers):\n  return [one(item) for item in items]");
    project.task(
        "plain_py.py",
        "def task(items, helpers):\n  return [ValueError('odd') if item % 2 else None for item in items]",
    );
    let items = r#"[{"n": 1, "bad": false}, {"n":  2, "bad": true}, {"n": 3, "bad": false}]"#;
    db.add_job(&format!("'batch', '{items}'")).await;
    db.add_job("'short', '[1, 2]'").await;
    db.add_job(&format!("'batch_py', '{items}'")).await;
    db.add_job("'plain_py', '[1, 2, 3]'").await;
    let (log, _guard) = Log::start();
    run_once(&db, &project).await;
    let sql = "select payload::text as payload, last_error from graphile_worker._private_jobs order by id";
    let left = db.rows(sql).await;
    assert_eq!(left.len(), 3, "the short one is done: {left:?}");
    assert_eq!(left[0]["payload"], r#"[{"n":  2, "bad": true}]"#, "as it was stored");
    assert!(left[0]["last_error"].as_str().unwrap().starts_with("1 of 3 items failed: no 2\n"), "{left:?}");
    assert_eq!(left[1]["payload"], r#"[{"n":  2, "bad": true}]"#);
    assert_eq!(left[2]["payload"], "[1,3]");
    assert!(log.line("returned 1 results for 2 items").is_some_and(|line| line.contains("short")), "{}", log.text());
}

#[tokio::test]
async fn tasks_add_jobs_through_the_worker() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "adds.js",
        "module.exports = async (_, { addJob, addJobs, getQueueName, job }) => {
           const added = await addJob('later', { b: 2, a: 1 }, { queueName: 'q', runAt: new Date('2030-01-01'), priority: 5, maxAttempts: 3, jobKey: 'k', jobKeyMode: 'preserve_run_at', flags: ['f'] });
           const many = await addJobs([{ identifier: 'many', payload: { n: 1 } }, { identifier: 'many', jobKey: 'm' }]);
           const refused = await addJob('later', {}, { maxAttempts: 1e9 }).catch((error) => error.message);
           note('added', [added.id, added.run_at instanceof Date, added.task_identifier, many.length, many[1].key, refused, await getQueueName(), await getQueueName(added.job_queue_id)]);
         };",
    );
    project.task(
        "adds_py.py",
        "def task(payload, helpers):
  job = helpers.add_job('later_py', {'b': 2, 'a': 1}, job_key='kp', priority=4)
  many = helpers.add_jobs([{'identifier': 'many_py', 'payload': {'n': 1}}, {'identifier': 'many_py'}])
  note('added_py', [job.id, job['task_identifier'], str(job.run_at.tzinfo), len(many), helpers.get_queue_name()])",
    );
    project.task(
        "adds_async.py",
        "async def task(payload, helpers):
  job = await helpers.add_job('later_async')
  many = await helpers.add_jobs([{'identifier': 'many_async'}])
  note('added_async', [job.payload, len(many), await helpers.get_queue_name()])",
    );
    db.add_job("'adds', queue_name := 'mine'").await;
    db.add_job("'adds_py', queue_name := 'mine'").await;
    db.add_job("'adds_async'").await;
    run_once(&db, &project).await;
    let added = &project.notes("added")[0];
    let added = added.as_array().unwrap();
    assert_eq!(added[1..5], [json!(true), json!("later"), json!(2), json!("m")], "{added:?}");
    assert!(added[5].as_str().unwrap().contains("cannot be used"), "{added:?}");
    assert_eq!((&added[6], &added[7]), (&json!("mine"), &json!("q")));
    let rows = db.rows("select t.identifier, j.payload::text as payload, j.key, j.priority, j.max_attempts, j.flags, j.run_at > now() as future from graphile_worker._private_jobs j join graphile_worker._private_tasks t on t.id = j.task_id order by j.id").await;
    let later = rows.iter().find(|row| row["identifier"] == "later").unwrap();
    assert_eq!(
        *later,
        json!({"identifier": "later", "payload": "{\"b\":2,\"a\":1}", "key": "k", "priority": 5, "max_attempts": 3, "flags": {"f": true}, "future": true})
    );
    let count = |task: &str| rows.iter().filter(|row| row["identifier"] == task).count();
    assert_eq!((count("many"), count("later_py"), count("many_py")), (2, 1, 2));
    assert_eq!((count("later_async"), count("many_async")), (1, 1));
    let python = project.notes("added_py")[0].as_array().unwrap().clone();
    assert_eq!(python[1..], [json!("later_py"), json!("UTC"), json!(2), json!("mine")]);
    assert_eq!(project.notes("added_async")[0], json!([{}, 1, null]));
}

#[tokio::test]
async fn a_query_without_a_driver_says_what_to_install() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("query.js", "module.exports = (_, { query }) => query('select 1');");
    project.task("query_py.py", "def task(payload, helpers):\n  helpers.query('select 1')");
    project.task("query_async.py", "async def task(payload, helpers):\n  await helpers.query('select 1')");
    for task in ["query", "query_py", "query_async"] {
        db.add_job(&format!("'{task}'")).await;
    }
    let python = HostOptions::default().python(project.virtual_environment().join("bin/python"));
    options(&db, &project)
        .task_source(TasksDir::new(project.tasks()).host_options(python))
        .init()
        .await
        .unwrap()
        .run_once()
        .await
        .unwrap();
    let errors = failed(&db, 3).await;
    assert!(errors[0].contains("need the package pg") && errors[0].contains("npm install pg"), "{}", errors[0]);
    assert!(errors[1].contains("helpers.query needs psycopg"), "{}", errors[1]);
    assert!(errors[2].contains("helpers.query needs psycopg or asyncpg"), "{}", errors[2]);
}

#[tokio::test]
async fn what_tasks_print_is_logged_with_the_job_they_print_it_for() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "speaks.js",
        "module.exports = async ({ name }, { logger, job }) => {
           console.log('hello %s', name);
           await new Promise(setImmediate);
           console.error('careful', { name });
           process.stdout.write('half '); process.stdout.write('a line\\n');
           logger.info('said', { meta: name });
           logger.scope({ part: 'two' }).warn('scoped');
           logger.debug('not shown');
           require('child_process').execSync('echo from a child', { stdio: 'inherit' });
           const circle = {}; circle.self = circle; logger.info('round', circle);
         };",
    );
    project.task(
        "speaks_py.py",
        "import subprocess
def task(payload, helpers):
  print('hello', payload['name'], end='')
  print('!')
  print('careful', file=sys.stderr)
  helpers.logger.info('said in python', {'meta': 1})
  subprocess.run(['echo', 'from a python child'])",
    );
    db.add_job("'speaks', '{\"name\": \"Ada\"}'").await;
    db.add_job("'speaks', '{\"name\": \"Grace\"}'").await;
    db.add_job("'speaks_py', '{\"name\": \"Linus\"}'").await;
    let (log, _guard) = Log::start();
    run_once(&db, &project).await;
    assert_eq!(jobs(&db).await, [] as [Value; 0]);
    for (text, also) in [
        ("hello Ada", vec!["INFO", "job_id=1"]),
        ("hello Grace", vec!["INFO", "job_id=2"]),
        ("careful { name: 'Ada' }", vec!["ERROR", "job_id=1"]),
        ("half a line", vec!["INFO", "job_id="]),
        ("meta=\"{\\\"meta\\\":\\\"Ada\\\"}\"", vec!["INFO", "job_id=1", "task_identifier=\"speaks\"", "said"]),
        ("scoped", vec!["WARN", "{\\\"part\\\":\\\"two\\\"}"]),
        ("round", vec!["Circular"]),
        ("hello Linus!", vec!["INFO", "job_id=3"]),
        ("careful label", vec!["WARN", "job_id=3"]),
        ("said in python", vec!["job_id=3"]),
    ] {
        let line = log.line(text).unwrap_or_else(|| panic!("{text:?} is not in\n{}", log.text()));
        assert!(also.iter().all(|part| line.contains(part)), "{also:?} in {line}");
    }
    // These do not come through the host but by the process's own output, which is read when it comes.
    for text in ["from a child", "from a python child"] {
        until(text, async || log.line(text)).await;
    }
    assert!(log.line("not shown").is_none());
}

#[tokio::test]
async fn warnings_are_logged_as_warnings_and_uncaught_errors_as_errors() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "warns.js",
        "module.exports = async () => { process.emitWarning('careful in node'); await new Promise((r) => setTimeout(r, 10)); };",
    );
    project.task(
        "warns_py.py",
        "import threading, warnings
def raises():
  raise ValueError('floating in python')
def task(payload, helpers):
  warnings.warn('careful in python')
  thread = threading.Thread(target=raises)
  thread.start()
  thread.join()",
    );
    project.task(
        "rejects.js",
        "module.exports = () => { Promise.reject(new Error('floating in node')); return new Promise(() => {}); };",
    );
    for task in ["warns", "warns_py", "rejects"] {
        db.add_job(&format!("'{task}', queue_name := 'in-order', max_attempts := 1")).await;
    }
    let (log, _guard) = Log::start();
    run_once(&db, &project).await;
    assert_eq!(failed(&db, 1).await.len(), 1, "{:?}", jobs(&db).await);
    for (text, level) in [
        ("Warning: careful in node", "WARN"),
        ("UserWarning: careful in python", "WARN"),
        ("ValueError: floating in python", "ERROR"),
        ("floating in node", "ERROR"),
    ] {
        let line = log.line(text).unwrap_or_else(|| panic!("{text:?} is not in\n{}", log.text()));
        assert!(line.contains(level), "{level} in {line}");
    }
    let at_info: Vec<String> = log.text().lines().filter(|line| line.contains("INFO")).map(str::to_owned).collect();
    assert!(!at_info.iter().any(|line| line.contains("floating") || line.contains("rejects.js")), "{at_info:?}");
}

/// The command lines of a process group: of a host, and of the shell beside it.
fn command_lines(group: &Value) -> Vec<String> {
    let group_of = |pid: &str| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        Some(stat.rsplit(')').next()?.split_whitespace().nth(2)?.to_owned())
    };
    let processes = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let group = group.to_string();
    let of_group = processes.filter(|pid| group_of(pid).is_some_and(|pgrp| pgrp == group));
    of_group.filter_map(|pid| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()).collect()
}

#[tokio::test]
async fn a_list_of_processes_does_not_show_the_source_of_a_host() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("list.js", "module.exports = () => note('list', process.pid);");
    project.task("list_py.py", "def task(payload, helpers):\n  note('list', os.getpid())");
    let started = Started::new(options(&db, &project)).await;
    for task in ["list", "list_py"] {
        db.add_job(&format!("'{task}', max_attempts := 1")).await;
    }
    for group in project.noted("list", 2).await {
        let lines = command_lines(&group);
        assert!(lines.len() >= 2 && lines.iter().all(|line| line.len() < 1500), "{lines:?}");
    }
    started.stop().await;
}

#[tokio::test]
async fn a_task_that_ends_the_process_fails_its_jobs_and_nobody_elses() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("exits.js", "module.exports = () => process.exit(3);");
    project.task("fine.js", "module.exports = () => note('fine', 1);");
    project.task(
        "rejects.js",
        "module.exports = () => { Promise.reject(new Error('floating')); return new Promise(() => {}); };",
    );
    project.task("exits_py.py", "def task(payload, helpers):\n  sys.exit('so long')");
    for task in ["exits", "fine", "rejects", "exits_py"] {
        db.add_job(&format!("'{task}', queue_name := 'in-order'")).await;
    }
    run_once(&db, &project).await;
    let errors = failed(&db, 3).await;
    let because = "because of this job: the task called";
    assert_eq!(errors[0], format!("the host process of this task ended with exit code 3 {because} process.exit(3)"));
    let begin = "the host process of this task ended with exit code 1 while this job ran alone in it: a promise was rejected and not handled: floating\n";
    assert!(errors[1].starts_with(begin), "{}", errors[1]);
    assert_eq!(
        errors[2],
        format!("the host process of this task ended with exit code 1 {because} sys.exit('so long')")
    );
    assert_eq!((errors.len(), project.notes("fine").len()), (3, 1));
}

#[tokio::test]
async fn jobs_that_finished_before_the_process_ended_stay_finished() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("quick.js", "module.exports = () => {};");
    project.task("exits.js", "module.exports = () => process.exit(0);");
    // All at once, in one read of the host: the last of them ends it.
    for _ in 0..7 {
        db.add_job("'quick'").await;
    }
    db.add_job("'exits', priority := 1, max_attempts := 1").await;
    run_once(&db, &project).await;
    let left = jobs(&db).await;
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(left[0]["task_identifier"], "exits");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_is_killed_under_load_loses_nothing() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("work.js", "module.exports = async ({ n }) => { await new Promise(setImmediate); note('done', n); };");
    project.task("pid.js", "module.exports = () => note('pid', process.pid);");
    db.add_job("'pid'").await;
    let options = options(&db, &project).task_options("work", TaskOptions::default().backoff(|_| Duration::ZERO));
    let started = Started::new(options.poll_interval(Duration::from_millis(100))).await;
    let sql = "select graphile_worker.add_jobs(array(select (('work', json_build_object('n', n), null, null, null, null, null, null)::graphile_worker.job_spec) from generate_series(1, 3000) n))";
    db.run(sql).await;
    let mut killed = 0;
    for round in 1..=5 {
        project.noted("done", round * 300).await;
        let pid = project.noted("pid", 1).await.last().unwrap().clone();
        if is_alive(&pid) {
            std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
            killed += 1;
        }
        db.add_job("'pid', priority := -1").await;
        project.noted("pid", round + 1).await;
    }
    until("all jobs are done", async || (jobs(&db).await.is_empty()).then_some(())).await;
    started.stop().await;
    let mut done: Vec<u64> = project.notes("done").iter().map(|n| n.as_u64().unwrap()).collect();
    done.sort_unstable();
    done.dedup();
    assert_eq!(done, (1..=3000).collect::<Vec<u64>>());
    assert!(killed > 0);
}

#[tokio::test]
async fn a_killed_host_is_named_in_the_error() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("kills.js", "module.exports = () => { process.kill(process.pid, 'SIGKILL'); };");
    db.add_job("'kills'").await;
    run_once(&db, &project).await;
    let error = "the host process of this task was killed by signal 9 while this job ran alone in it";
    assert_eq!(last_error(&db).await, error);
}

#[tokio::test]
async fn a_host_that_hangs_past_a_timeout_is_killed_and_replaced() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("hangs.js", "module.exports = () => { note('pid', process.pid); for (;;); };");
    project.task("fine.js", "module.exports = () => note('fine', process.pid);");
    let limited = TaskOptions::default().timeout(Duration::from_millis(300));
    let worker = options(&db, &project)
        .task_source(TasksDir::new(project.tasks()).host_options(HostOptions::default().max_hosts(1)));
    let started = Started::new(worker.task_options("hangs", limited)).await;
    db.add_job("'hangs', max_attempts := 1").await;
    assert_eq!(failed(&db, 1).await, ["timed out after 300ms"]);
    let pid = project.noted("pid", 1).await.remove(0);
    gone(&pid).await;
    db.add_job("'fine'").await;
    assert_ne!(project.noted("fine", 1).await[0], pid);
    started.stop().await;
}

#[tokio::test]
async fn a_job_that_does_not_stop_takes_its_host_when_the_others_are_done() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "deaf.js",
        "module.exports = () => { note('pid', process.pid); return new Promise(() => setInterval(() => {}, 1000)); };",
    );
    project.task("slow.js", "module.exports = async () => { note('slow', process.pid); while (!require('fs').existsSync(OUT + '/go')) await new Promise((r) => setTimeout(r, 10)); };");
    project.task("fine.js", "module.exports = () => note('fine', process.pid);");
    let limited = TaskOptions::default().timeout(Duration::from_millis(100));
    let started = Started::new(options(&db, &project).task_options("deaf", limited)).await;
    db.add_job("'slow'").await;
    let slow = project.noted("slow", 1).await;
    db.add_job("'deaf', max_attempts := 1").await;
    failed(&db, 1).await;
    assert_eq!(project.notes("pid"), slow, "the same host");
    // It gets no more jobs,
    let mut added = 0;
    until("another host runs jobs", async || {
        db.add_job("'fine'").await;
        added += 1;
        Some(()).filter(|()| !project.notes("fine").is_empty() && *project.notes("fine").last().unwrap() != slow[0])
    })
    .await;
    // but the other job in it is not hurt.
    assert!(is_alive(&slow[0]));
    project.file("go", "");
    gone(&slow[0]).await;
    let left = until("all others are done", async || Some(jobs(&db).await).filter(|jobs| jobs.len() == 1)).await;
    assert_eq!(left[0]["task_identifier"], "deaf");
    started.stop().await;
    assert!(added > 0);
}

#[tokio::test]
async fn a_host_that_grows_past_its_limit_is_killed_with_a_sentence() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "grows.js",
        "module.exports = async () => { globalThis.held = Buffer.alloc(400 << 20, 1); await new Promise(() => {}); };",
    );
    db.add_job("'grows'").await;
    let limit = HostOptions::default().memory_limit(Some(256 << 20));
    options(&db, &project)
        .task_source(TasksDir::new(project.tasks()).host_options(limit))
        .init()
        .await
        .unwrap()
        .run_once()
        .await
        .unwrap();
    let error = last_error(&db).await;
    assert!(
        error.starts_with("the host process of this task was killed while this job ran alone in it: it used "),
        "{error}"
    );
    assert!(error.ends_with("MiB of memory, and its limit is 256 MiB"), "{error}");
}

#[tokio::test]
async fn running_jobs_are_told_when_the_worker_stops_and_hosts_end_with_it() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "waits.js",
        "module.exports = async (_, { abortSignal, abortPromise }) => {
           note('began', process.pid);
           await abortPromise.catch((error) => note('aborted', [error.name, abortSignal.aborted]));
         };",
    );
    project.task("waits_py.py", "def task(payload, helpers):\n  note('began', os.getpid())\n  helpers.abort_event.wait()\n  note('aborted', 'thread')");
    project.task("waits_async.py", "async def task(payload, helpers):\n  note('began', os.getpid())\n  await helpers.abort_event.wait()\n  note('aborted', 'async')");
    for task in ["waits", "waits_py", "waits_async"] {
        db.add_job(&format!("'{task}'")).await;
    }
    let started = Started::new(options(&db, &project)).await;
    let began = project.noted("began", 3).await;
    started.stop().await;
    let aborted = project.notes("aborted");
    assert!(aborted.contains(&json!(["AbortError", true])), "{aborted:?}");
    assert!(aborted.contains(&json!("thread")) && aborted.contains(&json!("async")), "{aborted:?}");
    assert_eq!(jobs(&db).await, [] as [Value; 0], "they ended in time");
    for pid in &began {
        assert!(!is_alive(pid), "hosts are gone when the worker is");
    }
}

#[tokio::test]
async fn a_job_that_ends_soon_after_the_worker_was_told_to_stop_is_not_disturbed() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "waits.js",
        "module.exports = async (_, { abortSignal }) => {
           abortSignal.addEventListener('abort', () => note('aborted', 0));
           note('began', 0);
           while (!require('fs').existsSync(OUT + '/go')) await new Promise((resolve) => setTimeout(resolve, 5));
         };",
    );
    db.add_job("'waits'").await;
    let (log, _guard) = Log::start();
    let grace_period = Duration::from_secs(60);
    let started = Started::new(options(&db, &project).shutdown_grace_period(grace_period)).await;
    project.noted("began", 1).await;
    started.worker.request_shutdown();
    until("the worker lets jobs finish", async || log.line("waiting for running jobs to finish")).await;
    std::fs::write(project.0.join("go"), "").unwrap();
    started.running.await.unwrap().unwrap();
    assert_eq!(project.notes("aborted"), [] as [Value; 0]);
    assert_eq!(jobs(&db).await, [] as [Value; 0], "it is done");
}

#[tokio::test]
async fn files_that_do_not_load_are_named_and_the_others_run() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("broken.js", "module.exports = async ( => {};");
    project.task("missing.mjs", "import 'no-such-package'; export default () => {};");
    project.task("number.cjs", "module.exports = 42;");
    project.task("leaves.js", "process.exit(7);");
    project.task("typed.ts", "export default async (payload: { a: number }): Promise<void> => note('typed', payload);");
    project.task("none.py", "def other(): pass");
    project.task("indent.py", "def task(payload, helpers):\nreturn 1");
    project.task("fine.js", "module.exports = () => note('fine', 1);");
    project.task("fine_py.py", "def task(payload):\n  note('fine', 2)");
    db.add_job("'fine'").await;
    db.add_job("'fine_py'").await;
    let (log, _guard) = Log::start();
    run_once(&db, &project).await;
    let line = log.lines("a file in the tasks folder is not a task");
    for text in [
        "file=broken.js problem=",
        "no-such-package",
        "number.cjs exports a value of type number, expected a function",
        "file=leaves.js problem=\"the host process ended with exit code 7 while it loaded the file",
        "none.py has no `task`, expected a function",
        "file=indent.py problem=",
    ] {
        assert!(line.contains(text), "{text:?} in {line}");
    }
    let version = std::process::Command::new("node").arg("--version").output().unwrap().stdout;
    if String::from_utf8(version).unwrap().starts_with("v20.") {
        assert!(line.contains("typed.ts is TypeScript, and Node v20"), "{line}");
    }
    let mut fine = project.notes("fine");
    fine.sort_by_key(Value::to_string);
    assert_eq!(fine, [json!(1), json!(2)]);
}

#[tokio::test]
async fn without_node_its_tasks_are_named_and_the_others_run() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("js.js", "module.exports = () => {};");
    project.task("python.py", "def task(payload, helpers):\n  note('ran', sys.argv)");
    db.add_job("'python'").await;
    db.add_job("'js'").await;
    let (log, _guard) = Log::start();
    let hosts = HostOptions::default().node("/nowhere/node");
    options(&db, &project)
        .task_source(TasksDir::new(project.tasks()).host_options(hosts))
        .init()
        .await
        .unwrap()
        .run_once()
        .await
        .unwrap();
    let line = log.lines("a file in the tasks folder is not a task");
    assert!(
        line.contains(
            "file=js.js problem=\"`/nowhere/node` does not exist: install Node, or say where it is (`--node`, `HostOptions::node`)\""
        ),
        "{line}"
    );
    assert_eq!(project.notes("ran"), [json!(["graphile-worker"])]);
    assert_eq!(jobs(&db).await[0]["attempts"], 0, "its jobs wait for somebody who can run them");
}

#[tokio::test]
async fn the_projects_virtual_environment_runs_its_python_files() {
    let db = Db::installed().await;
    let project = Project::new();
    let environment = project.virtual_environment();
    project.task(
        "where.py",
        "import lib_of_project\ndef task(payload, helpers):\n  note('where', [sys.prefix, lib_of_project.NAME])",
    );
    project.file("lib_of_project.py", "NAME = 'lib'");
    db.add_job("'where'").await;
    run_once(&db, &project).await;
    // One that is active is what its user wants.
    let environment = std::env::var("VIRTUAL_ENV").unwrap_or_else(|_| environment.to_str().unwrap().to_owned());
    assert_eq!(project.notes("where"), [json!([environment, "lib"])]);
}

#[tokio::test]
async fn a_second_host_is_started_only_when_the_first_has_no_time() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "idle.js",
        "module.exports = async () => { note('idle', process.pid); await new Promise((r) => setTimeout(r, 100)); };",
    );
    project.task("burns.js", "module.exports = () => { note('burns', process.pid); const end = Date.now() + 1500; while (Date.now() < end); };");
    let hosts = HostOptions::default().max_hosts(2);
    let started =
        Started::new(options(&db, &project).task_source(TasksDir::new(project.tasks()).host_options(hosts))).await;
    for _ in 0..40 {
        db.add_job("'idle'").await;
    }
    let mut pids = project.noted("idle", 40).await;
    pids.dedup();
    assert_eq!(pids.len(), 1, "jobs that wait leave it time");
    let two = until("two hosts are at work", async || {
        db.add_job("'burns'").await;
        let mut pids = project.notes("burns");
        pids.sort_by_key(Value::to_string);
        pids.dedup();
        Some(pids).filter(|pids| pids.len() == 2)
    })
    .await;
    assert!(two.contains(&pids[0]));
    db.run("delete from graphile_worker._private_jobs where locked_at is null").await;
    started.stop().await;
}

/// One worker process, for the test below: runs until it is killed.
#[tokio::test]
async fn worker_process_with_hosts() {
    let Ok(url) = std::env::var("GW_TEST_HOSTS_URL") else { return };
    let folder = std::env::var("GW_TEST_HOSTS_FOLDER").unwrap();
    let options = WorkerOptions::default().database_url(&url).concurrency(4);
    let worker = options.task_source(TasksDir::new(folder)).init().await.unwrap();
    worker.run().await.unwrap();
}

/// A process that is killed when it is dropped, a test that fails included.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn what_a_worker_runs_ends_when_it_is_killed_even_hosts_that_do_not_listen() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("hangs.js", "module.exports = () => { note('pid', process.pid); for (;;); };");
    project.task("hangs_py.py", "async def task(payload, helpers):\n  note('pid', os.getpid())\n  while True: pass");
    project.task("child.js", "module.exports = () => new Promise(() => { note('pid', require('child_process').spawn('sleep', ['1000']).pid); });");
    // One that has read its payload is known to whoever ends it.
    let program = "cat > /dev/null; echo $$ >> pid; sleep 1000 & echo $! >> pid; wait";
    project.file("tasks/program", &format!("#!/bin/sh\ncd '{}'; {program}\n", project.0.display()));
    let runnable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(project.tasks().join("program"), runnable).unwrap();
    db.add_job("'child', queue_name := 'a'").await;
    let worker = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "hosts::worker_process_with_hosts", "--nocapture"])
        .env("GW_TEST_HOSTS_URL", db.url())
        .env("GW_TEST_HOSTS_FOLDER", project.tasks())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let worker = Killed(worker);
    project.noted("pid", 1).await;
    db.add_job("'hangs_py'").await;
    project.noted("pid", 2).await;
    db.add_job("'hangs'").await;
    project.noted("pid", 3).await;
    db.add_job("'program'").await;
    let pids = project.noted("pid", 5).await;
    assert!(pids.iter().all(is_alive));
    drop(worker);
    for pid in &pids {
        gone(pid).await;
    }
}

#[tokio::test]
async fn a_job_may_be_as_large_as_it_likes() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("large.js", "module.exports = async ({ text }, { addJob }) => { await addJob('more', { text: text + 'é' }); note('large', text.length); };");
    project.task("large_py.py", "def task(payload, helpers):\n  note('large', len(payload['text']))");
    for task in ["large", "large_py"] {
        db.add_job(&format!("'{task}', json_build_object('text', repeat('é', 3000000))")).await;
    }
    run_once(&db, &project).await;
    assert_eq!(project.notes("large"), [json!(3_000_000), json!(3_000_000)]);
    let sql = "select length(payload->>'text') from graphile_worker._private_jobs";
    assert_eq!(db.value(sql).await, 3_000_001);
}

#[tokio::test]
async fn utilities_of_rust_and_scripts_see_the_same_jobs() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "script.js",
        "module.exports = async (payload, { addJob }) => { await addJob('rust', { n: payload.n + 1 }); };",
    );
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let worker = options(&db, &project).define_task("rust", move |payload: Value, _| {
        sender.send(payload).unwrap();
        async {}
    });
    let worker: Worker = worker.init().await.unwrap();
    worker.create_utils().add_raw_job("script", json!({"n": 1}), JobSpec::default()).await.unwrap();
    worker.run_once().await.unwrap();
    assert_eq!(receiver.recv().await, Some(json!({"n": 2})));
    worker.create_utils().add_raw_job("script", json!({"n": 5}), JobSpec::default()).await.unwrap();
    worker.run_once().await.unwrap();
    assert_eq!(receiver.recv().await, Some(json!({"n": 6})), "hosts come back when they are needed again");
}

#[tokio::test]
async fn an_edited_file_takes_effect_for_the_next_job_and_running_ones_keep_the_old_code() {
    let db = Db::installed().await;
    let project = Project::new();
    // Each version says which it is before and after it has waited, and which version of its library it has.
    let write = |version: u32| {
        let wait = "while (!require('fs').existsSync(OUT + '/go')) await new Promise((r) => setTimeout(r, 10));";
        let body = format!(
            "const lib = require('../lib.js');\nmodule.exports = async ({{ waits }}) => {{ note('common', [{version}, 'begins', lib]); if (waits) {{ {wait} note('common', [{version}, 'ends', lib]); }} }};"
        );
        project.task("common.js", &body);
        project.task("module.mjs", &format!("export default async () => note('module', {version});"));
        project.task(
            "python.py",
            &format!(
                "from helping import VERSION\ndef task(payload, helpers):\n  note('python', [{version}, VERSION])"
            ),
        );
        project.file("lib.js", &format!("module.exports = {version};"));
        project.file("tasks/helping.py", &format!("VERSION = {version}\ndef task(payload): pass"));
    };
    write(1);
    let started = Started::new(options(&db, &project).watch(true)).await;
    db.add_job("'common', '{\"waits\": true}'").await;
    assert_eq!(project.noted("common", 1).await, [json!([1, "begins", 1])]);
    write(2);
    until("the second version runs", async || {
        db.add_job("'common', '{}'").await;
        db.add_job("'module'").await;
        db.add_job("'python'").await;
        let common = project.notes("common").contains(&json!([2, "begins", 2]));
        let python = project.notes("python").contains(&json!([2, 2]));
        (common && python && project.notes("module").contains(&json!(2))).then_some(())
    })
    .await;
    project.file("go", "");
    until("the old one ends", async || project.notes("common").contains(&json!([1, "ends", 1])).then_some(())).await;
    started.stop().await;
}

#[tokio::test]
async fn a_file_that_no_longer_loads_keeps_its_old_version_and_says_why() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("careful.js", "module.exports = () => note('js', 1);");
    project.task("careful_py.py", "def task(payload, helpers):\n  note('py', 1)");
    let (log, _guard) = Log::start();
    let started = Started::new(options(&db, &project).watch(true)).await;
    project.task("careful.js", "module.exports = () => note('js', 2;");
    project.task("careful_py.py", "def task(payload, helpers):\n  note('py', 2");
    for file in ["careful.js", "careful_py.py"] {
        let line = until("it is said", async || {
            let text = log.text();
            text.lines()
                .find(|line| line.contains("keeping its previous version") && line.contains(file))
                .map(str::to_owned)
        });
        let line = line.await;
        assert!(
            line.contains("SyntaxError") || line.contains("missing )") || line.contains("was never closed"),
            "{line}"
        );
    }
    db.add_job("'careful'").await;
    db.add_job("'careful_py'").await;
    assert_eq!((project.noted("js", 1).await, project.noted("py", 1).await), (vec![json!(1)], vec![json!(1)]));
    project.task("careful.js", "module.exports = () => note('js', 3);");
    until("the repaired one runs", async || {
        db.add_job("'careful'").await;
        project.notes("js").contains(&json!(3)).then_some(())
    })
    .await;
    started.stop().await;
}

#[tokio::test]
async fn a_host_of_ones_own_runs_files_of_its_language() {
    let db = Db::installed().await;
    let project = Project::new();
    // A language in which a file is what is to be noted.
    let host = r#"
        const fs = require('fs'), net = require('net');
        const socket = new net.Socket({ fd: Number(process.env.GRAPHILE_WORKER_HOST_FD) });
        const files = {};
        require('readline').createInterface({ input: socket }).on('line', (line) => {
          const frame = JSON.parse(line);
          const say = (answer) => socket.write(JSON.stringify(answer) + '\n');
          if (frame.type === 'hello') say({ type: 'hello', protocol: 1, language: 'notes', version: '1', pid: process.pid });
          if (frame.type === 'load') { files[frame.task] = frame.path; say({ type: 'loaded', task: frame.task, generation: frame.generation }); }
          if (frame.type === 'ping') say({ type: 'pong', id: frame.id });
          if (frame.type === 'run') { fs.appendFileSync(process.env.OUT, fs.readFileSync(files[frame.task])); say({ type: 'done', ids: [frame.id] }); }
        });
        socket.on('end', () => process.exit());
    "#;
    project.file("host.js", host).file("tasks/hello.note", "\"hello\"\n");
    let out = project.0.join("notes");
    let command = ["env".to_owned(), format!("OUT={}", out.display()), "node".to_owned()];
    let script = project.0.join("host.js").display().to_string();
    let hosts = HostOptions::default().language("Notes", ["note"], command.into_iter().chain([script]));
    db.add_job("'hello'").await;
    options(&db, &project)
        .task_source(TasksDir::new(project.tasks()).host_options(hosts))
        .init()
        .await
        .unwrap()
        .run_once()
        .await
        .unwrap();
    assert_eq!(project.notes("notes"), [json!("hello")]);
    assert_eq!(jobs(&db).await, [] as [Value; 0]);
}

#[tokio::test]
async fn a_job_is_handed_back_only_when_its_host_is_gone() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("hangs.js", "module.exports = () => { note('pid', process.pid); for (;;); };");
    db.add_job("'hangs', queue_name := 'q'").await;
    let options = options(&db, &project).shutdown_grace_period(Duration::from_millis(100));
    let started = Started::new(options).await;
    let pid = project.noted("pid", 1).await.remove(0);
    started.worker.request_shutdown();
    // The next job of the queue may begin elsewhere at this moment.
    let sql = "select count(*) from graphile_worker._private_job_queues where locked_by is null";
    until("the queue is free", async || (db.value(sql).await == 1).then_some(())).await;
    assert!(!is_alive(&pid));
    started.running.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_host_that_gets_no_more_jobs_is_gone_when_the_worker_is() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("deaf.js", "module.exports = () => { note('pid', process.pid); return new Promise(() => {}); };");
    project.task(
        "waits.js",
        "module.exports = (_, { abortPromise }) => { note('pid', process.pid); return abortPromise.catch(() => {}); };",
    );
    project.task("fine.js", "module.exports = () => note('fine', process.pid);");
    let limited = TaskOptions::default().timeout(Duration::from_millis(100));
    let started = Started::new(options(&db, &project).task_options("deaf", limited).watch(true)).await;
    db.add_job("'waits'").await;
    let pid = project.noted("pid", 1).await.remove(0);
    db.add_job("'deaf', max_attempts := 1").await;
    failed(&db, 1).await;
    until("another host runs jobs", async || {
        db.add_job("'fine'").await;
        project.notes("fine").iter().any(|other| *other != pid).then_some(())
    })
    .await;
    // Whoever loads a file looks through the hosts.
    project.task("fine.js", "module.exports = () => note('loaded', process.pid);");
    until("the new version runs", async || {
        db.add_job("'fine'").await;
        (!project.notes("loaded").is_empty()).then_some(())
    })
    .await;
    assert!(is_alive(&pid));
    started.stop().await;
    assert!(!is_alive(&pid));
}

#[tokio::test]
async fn jobs_do_not_go_to_a_host_that_has_ended_although_somebody_holds_its_socket() {
    let db = Db::installed().await;
    let project = Project::new();
    // A host of Python, whose descriptors are inherited on purpose.
    project.task(
        "exits.py",
        "import subprocess\ndef task(payload, helpers):\n  subprocess.Popen(['sleep', '10'], pass_fds=[3], start_new_session=True)\n  note('exits', os.getpid())\n  os._exit(3)",
    );
    project.task("fine.py", "def task(payload, helpers):\n  note('fine', os.getpid())");
    let started = Started::new(options(&db, &project)).await;
    db.add_job("'exits', max_attempts := 1").await;
    let pid = project.noted("exits", 1).await.remove(0);
    gone(&pid).await;
    db.add_job("'fine', max_attempts := 1").await;
    project.noted("fine", 1).await;
    started.stop().await;
}

#[tokio::test]
async fn a_host_that_cannot_start_is_told_with_all_that_it_printed() {
    let db = Db::installed().await;
    let project = Project::new();
    project.file("tasks/hello.note", "");
    let script = "for n in 1 2 3 4 5 6; do echo problem $n; done >&2; exit 1";
    let hosts = HostOptions::default().language("Notes", ["note"], ["sh", "-c", script]);
    let (log, _guard) = Log::start();
    drop(options(&db, &project).task_source(TasksDir::new(project.tasks()).host_options(hosts)).init().await.unwrap());
    let line = log.lines("a file in the tasks folder is not a task");
    assert!(line.contains("it printed:\\nproblem 1\\n") && line.contains("\\nproblem 6"), "{line}");
    assert!(log.line("host ended").is_none(), "it is said once: {}", log.text());
}

/// A Node that cannot start a host while there is a file `bad` in the project; says so in `tried`.
fn unreliable_node(project: &Project) -> HostOptions {
    let out = project.0.display();
    project.file(
        "node.sh",
        &format!(
            "#!/bin/sh\n[ \"$1\" = --version ] && exec node --version\necho 1 >> {out}/tried\n[ -e {out}/bad ] && {{ echo no luck >&2; exit 1; }}\nexec node \"$@\"\n"
        ),
    );
    let program = project.0.join("node.sh");
    let mut mode = std::fs::metadata(&program).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut mode, 0o755);
    std::fs::set_permissions(&program, mode).unwrap();
    HostOptions::default().node(program)
}

#[tokio::test]
async fn tasks_whose_host_did_not_start_with_the_worker_are_there_when_it_starts() {
    let db = Db::installed().await;
    let project = Project::new();
    let hosts = unreliable_node(&project);
    project.task("fine.js", "module.exports = () => note('fine', 1);").file("bad", "");
    let (log, _guard) = Log::start();
    let options = options(&db, &project).task_source(TasksDir::new(project.tasks()).host_options(hosts));
    // A limit for a task that is not there yet is not a mistake.
    let options = options.task_options("fine", TaskOptions::default().timeout(Duration::from_secs(60)));
    let started = Started::new(options).await;
    db.add_job("'fine', max_attempts := 1").await;
    let tried = project.notes("tried").len();
    until("it is tried again", async || (project.notes("tried").len() > tried).then_some(())).await;
    assert_eq!(project.notes("fine"), [] as [Value; 0]);
    let line = log.line("cannot start a host").unwrap();
    assert!(line.contains("WARN") && line.contains("no luck"), "{line}");
    let line = log.line("tasks are unavailable until their host starts").unwrap();
    assert!(line.contains("WARN") && line.contains("tasks=\"fine\" again_in=1"), "{line}");
    std::fs::remove_file(project.0.join("bad")).unwrap();
    project.noted("fine", 1).await;
    until("the job is done", async || jobs(&db).await.is_empty().then_some(())).await;
    started.stop().await;
}

#[tokio::test]
async fn a_host_that_dies_once_while_the_worker_starts_is_started_again() {
    let db = Db::installed().await;
    let project = Project::new();
    let hosts = unreliable_node(&project);
    project.task("fine.js", "module.exports = () => note('fine', 1);");
    // The first host dies while it loads this file.
    project.task(
        "once.js",
        "if (!require('fs').existsSync(OUT + '/once')) { note('once', 1); process.kill(process.pid, 9); } module.exports = () => note('fine', 2);",
    );
    db.add_job("'fine', max_attempts := 1").await;
    db.add_job("'once', max_attempts := 1").await;
    options(&db, &project)
        .task_source(TasksDir::new(project.tasks()).host_options(hosts))
        .init()
        .await
        .unwrap()
        .run_once()
        .await
        .unwrap();
    assert_eq!(project.notes("fine").len(), 2, "{:?}", jobs(&db).await);
}

#[tokio::test]
async fn a_host_whose_worker_is_given_up_while_it_starts_ends() {
    let db = Db::installed().await;
    let project = Project::new();
    let host = r#"
        const fs = require('fs'), [out] = process.argv.slice(2);
        const socket = new (require('net').Socket)({ fd: Number(process.env.GRAPHILE_WORKER_HOST_FD) });
        fs.writeFileSync(out + '/pid', `${process.pid}\n`);
        const hello = { type: 'hello', protocol: 1, language: 'notes', version: '1', pid: process.pid };
        setInterval(() => fs.existsSync(out + '/go') && socket.write(JSON.stringify(hello) + '\n'), 10);
        socket.on('end', () => process.exit()).resume();
    "#;
    project.file("host.js", host).file("tasks/hello.note", "");
    let command = ["node".to_owned(), format!("{}/host.js", project.0.display()), project.0.display().to_string()];
    let hosts = HostOptions::default().language("Notes", ["note"], command);
    let mut init =
        Box::pin(options(&db, &project).task_source(TasksDir::new(project.tasks()).host_options(hosts)).init());
    let pid = tokio::select! {
        _ = &mut init => panic!("it has not said hello"),
        mut pids = project.noted("pid", 1) => pids.remove(0),
    };
    drop(init);
    project.file("go", "");
    gone(&pid).await;
}

#[tokio::test]
async fn a_job_does_not_go_to_a_host_that_hangs_where_another_can_be_started() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("hangs.js", "module.exports = () => { note('hangs', process.pid); for (;;); };");
    project.task("fine.js", "module.exports = () => note('fine', process.pid);");
    let (log, _guard) = Log::start();
    let hosts = HostOptions::default().max_hosts(2);
    let options = options(&db, &project).concurrency(100).shutdown_grace_period(Duration::ZERO);
    let started = Started::new(options.task_source(TasksDir::new(project.tasks()).host_options(hosts))).await;
    db.add_job("'hangs'").await;
    project.noted("hangs", 1).await;
    let other = until("another host runs jobs", async || {
        db.add_job("'fine'").await;
        project.notes("fine").pop()
    })
    .await;
    // Without it, there is only the one of which is known that it hangs.
    std::process::Command::new("kill").args(["-9", &other.to_string()]).status().unwrap();
    until("that is noticed", async || log.line("host ended")).await;
    db.run("delete from graphile_worker._private_jobs where locked_at is null").await;
    db.add_job("'fine', '{\"last\": true}'").await;
    until("a third host runs jobs", async || project.notes("fine").into_iter().find(|pid| *pid != other)).await;
    started.stop().await;
}

#[tokio::test]
async fn a_file_is_not_blamed_for_a_job_that_ends_the_host_while_it_is_loaded() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("edited.mjs", "export default () => note('ran', 1);");
    project.task("exits.js", "module.exports = () => process.exit(3);");
    let (log, _guard) = Log::start();
    let started = Started::new(options(&db, &project).watch(true)).await;
    let wait = "while (!fs.existsSync(OUT + '/go')) await new Promise((resolve) => setTimeout(resolve, 5));";
    project.task("edited.mjs", &format!("note('loading', 1);\n{wait}\nexport default () => note('ran', 2);"));
    project.noted("loading", 1).await;
    db.add_job("'exits', max_attempts := 1").await;
    failed(&db, 1).await;
    project.file("go", "");
    until("the new version is there", async || log.line("task changed")).await;
    assert!(log.line("cannot be loaded").is_none(), "{}", log.text());
    db.add_job("'edited'").await;
    assert_eq!(project.noted("ran", 1).await, [json!(2)]);
    started.stop().await;
}
