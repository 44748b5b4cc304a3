//! Loading scripts, and reloading them when their files change.

use crate::helpers::{Project, failed, options, run_once};
use crate::support::{Db, Log, Started, until};
use serde_json::{Value, json};

#[tokio::test]
async fn files_that_do_not_load_are_reported_and_the_others_run() {
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
        assert!(line.contains("typed.ts is TypeScript, which Node v20"), "{line}");
    }
    let mut fine = project.notes("fine");
    fine.sort_by_key(Value::to_string);
    assert_eq!(fine, [json!(1), json!(2)]);
}

#[tokio::test]
async fn the_next_job_runs_the_edited_file_and_running_jobs_keep_the_old_code() {
    let db = Db::installed().await;
    let project = Project::new();
    // Each version notes its number and that of its library, before and after it waits.
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
async fn a_file_that_no_longer_loads_keeps_its_previous_version() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("careful.js", "module.exports = () => note('js', 1);");
    project.task("careful_py.py", "def task(payload, helpers):\n  note('py', 1)");
    let (log, _guard) = Log::start();
    let started = Started::new(options(&db, &project).watch(true)).await;
    project.task("careful.js", "module.exports = () => note('js', 2;");
    project.task("careful_py.py", "def task(payload, helpers):\n  note('py', 2");
    for file in ["careful.js", "careful_py.py"] {
        let line = until("the problem is logged", async || {
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
    until("the repaired file runs", async || {
        db.add_job("'careful'").await;
        project.notes("js").contains(&json!(3)).then_some(())
    })
    .await;
    started.stop().await;
}

#[tokio::test]
async fn a_file_loads_again_if_a_job_ends_the_host_meanwhile() {
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
