//! What a task in JavaScript or Python returns: errors, failed items of a batch, and output for the log.

use crate::helpers::{Project, failed, jobs, run_once};
use crate::support::{Db, Log, until};
use serde_json::Value;

#[tokio::test]
async fn an_error_has_its_message_and_its_stack() {
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
    assert!(!errors[0].contains("[eval"), "the stack has no frames of the host: {}", errors[0]);
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
async fn a_lone_surrogate_does_not_end_the_host() {
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
async fn only_the_failed_items_of_a_batch_are_retried() {
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
    assert_eq!(left.len(), 3, "`short` is completed: {left:?}");
    assert_eq!(left[0]["payload"], r#"[{"n":  2, "bad": true}]"#, "the text of the item is unchanged");
    assert!(left[0]["last_error"].as_str().unwrap().starts_with("1 of 3 items failed: no 2\n"), "{left:?}");
    assert_eq!(left[1]["payload"], r#"[{"n":  2, "bad": true}]"#);
    assert_eq!(left[2]["payload"], "[1,3]");
    assert!(log.line("returned 1 results for 2 items").is_some_and(|line| line.contains("short")), "{}", log.text());
}

#[tokio::test]
async fn script_output_is_logged_with_its_job() {
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
    // Child processes write to the output of the host process, which the worker reads independently of the host's frames.
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
        "module.exports = async () => { process.emitWarning('careful in node'); await new Promise(setImmediate); };",
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
