//! When hosts start: the programs that run them, hosts that fail to start, and when another one is needed.

use crate::helpers::{Project, gone, jobs, options};
use crate::support::{Db, Log, Started, until};
use graphile_worker::TaskOptions;
use graphile_worker_scripts::{HostOptions, TasksDir};
use serde_json::{Value, json};
use std::time::Duration;

#[tokio::test]
async fn a_custom_host_runs_files_of_its_language() {
    let db = Db::installed().await;
    let project = Project::new();
    // A language in which the contents of a file are the note to write.
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
async fn a_process_list_does_not_show_the_source_of_a_host() {
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

/// The command lines of a process group: the host, and the shell that ends it with the worker.
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
async fn if_node_is_missing_its_tasks_are_reported_and_other_tasks_run() {
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
            "file=js.js problem=\"`/nowhere/node` does not exist: install Node, or set its path (`--node`, `HostOptions::node`)\""
        ),
        "{line}"
    );
    assert_eq!(project.notes("ran"), [json!(["graphile-worker"])]);
    assert_eq!(jobs(&db).await[0]["attempts"], 0, "its job waits for a worker that can run it");
}

#[tokio::test]
async fn a_host_that_cannot_start_is_logged_with_its_output() {
    let db = Db::installed().await;
    let project = Project::new();
    project.file("tasks/hello.note", "");
    let script = "for n in 1 2 3 4 5 6; do echo problem $n; done >&2; exit 1";
    let hosts = HostOptions::default().language("Notes", ["note"], ["sh", "-c", script]);
    let (log, _guard) = Log::start();
    drop(options(&db, &project).task_source(TasksDir::new(project.tasks()).host_options(hosts)).init().await.unwrap());
    let line = log.lines("a file in the tasks folder is not a task");
    assert!(line.contains("it printed:\\nproblem 1\\n") && line.contains("\\nproblem 6"), "{line}");
    assert!(log.line("host ended").is_none(), "the failure is logged once: {}", log.text());
}

/// A Node that cannot start a host while the project has a file `bad`. It notes each start in `tried`.
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
async fn tasks_become_available_when_their_host_starts() {
    let db = Db::installed().await;
    let project = Project::new();
    let hosts = unreliable_node(&project);
    project.task("fine.js", "module.exports = () => note('fine', 1);").file("bad", "");
    let (log, _guard) = Log::start();
    let options = options(&db, &project).task_source(TasksDir::new(project.tasks()).host_options(hosts));
    // Options for a task that is not available yet are not an error.
    let options = options.task_options("fine", TaskOptions::default().timeout(Duration::from_secs(60)));
    let started = Started::new(options).await;
    db.add_job("'fine', max_attempts := 1").await;
    let tried = project.notes("tried").len();
    until("the host is retried", async || (project.notes("tried").len() > tried).then_some(())).await;
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
async fn a_host_that_dies_while_it_loads_a_file_is_restarted() {
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
async fn a_starting_host_ends_if_its_worker_is_dropped() {
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
        _ = &mut init => panic!("the host has not sent hello"),
        mut pids = project.noted("pid", 1) => pids.remove(0),
    };
    drop(init);
    project.file("go", "");
    gone(&pid).await;
}

#[tokio::test]
async fn a_second_host_starts_only_if_the_first_is_busy() {
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
    assert_eq!(pids.len(), 1, "jobs that only wait do not make the host busy");
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

#[tokio::test]
async fn a_job_starts_in_a_new_host_if_the_existing_one_hangs() {
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
    // Without this host, only the one that hangs is left.
    std::process::Command::new("kill").args(["-9", &other.to_string()]).status().unwrap();
    until("the worker notices it", async || log.line("host ended")).await;
    db.run("delete from graphile_worker._private_jobs where locked_at is null").await;
    db.add_job("'fine', '{\"last\": true}'").await;
    until("a third host runs jobs", async || project.notes("fine").into_iter().find(|pid| *pid != other)).await;
    started.stop().await;
}
