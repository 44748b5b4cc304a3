//! Executables as tasks: their input, output and exit codes, how they are stopped with their child processes, and changes
//! of the folder while the worker runs.

use crate::helpers::{is_alive, last_error};
use crate::support::{Db, Log, PATIENCE, Started, until};
use graphile_worker::{TaskOptions, WorkerOptions};
use graphile_worker_scripts::TasksDir;
use serde_json::{Value, json};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A folder with a folder of tasks in it, deleted after the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NUMBER: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("graphile_worker_tasks_{}_{number}", std::process::id()));
        std::fs::create_dir_all(path.join("tasks")).unwrap();
        Folder(path)
    }

    fn tasks(&self) -> PathBuf {
        self.0.join("tasks")
    }

    /// The path of a file outside the folder of tasks.
    fn beside(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.beside(name)).unwrap_or_default()
    }

    /// Writes a file atomically, so that the worker never reads half of it.
    fn write(&self, name: &str, text: &str, mode: u32) {
        let path = self.tasks().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let new = path.with_file_name(format!(".{}.new", path.file_name().unwrap().to_str().unwrap()));
        std::fs::write(&new, text).unwrap();
        std::fs::set_permissions(&new, std::fs::Permissions::from_mode(mode)).unwrap();
        std::fs::rename(new, path).unwrap();
    }

    /// Writes a shell script. In it, `$OUT` is the parent of the folder of tasks.
    fn script(&self, name: &str, body: &str) {
        self.write(name, &format!("#!/bin/sh\nOUT='{}'\n{body}\n", self.0.display()), 0o755);
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn options(db: &Db, folder: &Folder) -> WorkerOptions {
    WorkerOptions::default()
        .pg_pool(db.pool.clone())
        .listen_os_shutdown_signals(false)
        .concurrency(4)
        .poll_interval(Duration::from_secs(3600))
        .task_source(TasksDir::new(folder.tasks()))
}

async fn run_once(db: &Db, folder: &Folder) {
    options(db, folder).init().await.unwrap().run_once().await.unwrap();
}

async fn count(db: &Db) -> Value {
    db.value("select count(*) from graphile_worker.jobs").await
}

/// The processes that a program has written to `pids`, once there are this many whole lines.
fn processes(folder: &Folder, count: usize) -> Option<Vec<String>> {
    let text = folder.text("pids");
    let pids: Vec<String> = text.lines().map(str::to_owned).collect();
    (pids.len() == count && text.ends_with('\n')).then_some(pids)
}

#[tokio::test]
async fn a_program_receives_the_job_and_completes_it_with_exit_code_0() {
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script("hello.sh", "cat > \"$OUT/stdin\"; env | grep ^GRAPHILE_ | sort > \"$OUT/env\"; pwd > \"$OUT/cwd\"");
    db.add_job("'hello', '{\"name\":\n \"Ada\", \"n\": 12345678901234567890}', job_key := 'k 1', priority := -3, max_attempts := 7, run_at := '2024-02-03T04:05:06.789Z'").await;
    run_once(&db, &folder).await;
    assert_eq!(folder.text("stdin"), "{\"payload\":{\"name\":  \"Ada\", \"n\": 12345678901234567890}}", "on one line");
    let env = folder.text("env");
    let (url, env) = env.split_once('\n').unwrap();
    let name = db.options().get_database().unwrap().to_owned();
    assert!(url.starts_with("GRAPHILE_WORKER_DATABASE_URL=postgres://postgres:") && url.ends_with(&name), "{url}");
    assert_eq!(
        env,
        "GRAPHILE_WORKER_JOB_ATTEMPTS=1\nGRAPHILE_WORKER_JOB_ID=1\nGRAPHILE_WORKER_JOB_KEY=k 1\n\
         GRAPHILE_WORKER_JOB_MAX_ATTEMPTS=7\nGRAPHILE_WORKER_JOB_PRIORITY=-3\n\
         GRAPHILE_WORKER_JOB_RUN_AT=2024-02-03T04:05:06.789Z\nGRAPHILE_WORKER_PAYLOAD_FORMAT=json\n\
         GRAPHILE_WORKER_TASK_IDENTIFIER=hello\n"
    );
    assert_eq!(Path::new(folder.text("cwd").trim()), std::env::current_dir().unwrap(), "the worker's own");
    assert_eq!(count(&db).await, 0);
}

#[tokio::test]
async fn the_error_of_a_failed_program_has_its_exit_code_and_last_lines() {
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script("fails", "for n in $(seq 1 200); do echo line $n >&2; done; echo said; exit 3");
    db.add_job("'fails'").await;
    run_once(&db, &folder).await;
    let error = last_error(&db).await;
    assert!(error.starts_with("exited with code 3:\nline 151\nline 152\n") && error.ends_with("\nline 200"), "{error}");

    folder.script("fails", "exit 4");
    db.run("update graphile_worker._private_jobs set run_at = now()").await;
    run_once(&db, &folder).await;
    assert_eq!(last_error(&db).await, "exited with code 4");
}

#[tokio::test]
async fn the_error_of_a_killed_program_names_the_signal() {
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script("dies", "echo almost >&2; kill -9 $$");
    db.add_job("'dies'").await;
    run_once(&db, &folder).await;
    assert_eq!(last_error(&db).await, "killed by signal 9 (SIGKILL):\nalmost");
}

#[tokio::test]
async fn program_output_is_logged_with_its_job() {
    let (log, _logging) = Log::start();
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script("talks", "echo to stdout; echo to stderr >&2; printf 'no end'");
    db.add_job("'talks'").await;
    run_once(&db, &folder).await;
    let line = |text: &str| log.line(text).unwrap_or_else(|| panic!("{text} is not in\n{}", log.text()));
    assert!(line("to stdout").contains("INFO") && line("to stderr").contains("WARN"), "{}", log.text());
    let words = line("no end");
    assert!(words.contains("task_identifier=\"talks\"") && words.contains("job_id=1"), "{words}");
}

#[tokio::test]
async fn a_timeout_stops_a_program_and_its_child_processes() {
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script("hangs", "(sleep 1000 & echo $! >> \"$OUT/pids\"; wait) & echo $$ >> \"$OUT/pids\"; wait");
    db.add_job("'hangs'").await;
    let worker = options(&db, &folder)
        .task_options("hangs", TaskOptions::default().timeout(Duration::from_millis(500)))
        .init()
        .await
        .unwrap();
    worker.run_once().await.unwrap();
    assert_eq!(last_error(&db).await, "timed out after 500ms");
    let pids = processes(&folder, 2).unwrap();
    assert!(pids.iter().all(|pid| !is_alive(pid)), "{pids:?}");
}

#[tokio::test]
async fn output_after_the_sigterm_of_a_timeout_is_logged() {
    let (log, _logging) = Log::start();
    let db = Db::installed().await;
    let folder = Folder::new();
    let goodbye = "trap 'echo tidying up; echo was at row 7 >&2; echo > \"$OUT/tidy\"; exit 1' TERM";
    folder.script("tidies", &format!("{goodbye}; while :; do sleep 0.02; done"));
    db.add_job("'tidies'").await;
    let timeout = TaskOptions::default().timeout(Duration::from_millis(500));
    options(&db, &folder).task_options("tidies", timeout).init().await.unwrap().run_once().await.unwrap();
    let error = last_error(&db).await;
    assert!(error.starts_with("timed out after 500ms:\n") && error.ends_with("was at row 7"), "{error}");
    assert!(log.line("tidying up").is_some_and(|line| line.contains("job_id=1")), "{}", log.text());
    assert!(folder.beside("tidy").exists());
}

#[tokio::test]
async fn output_after_the_sigterm_of_a_shutdown_is_logged() {
    let (log, _logging) = Log::start();
    let db = Db::installed().await;
    let folder = Folder::new();
    let goodbye = "trap 'echo tidying up; echo was at row 7 >&2; echo > \"$OUT/tidy\"; exit 1' TERM";
    folder.script("tidies", &format!("{goodbye}; echo $$ > \"$OUT/pids\"; while :; do sleep 0.02; done"));
    db.add_job("'tidies'").await;
    let started = Started::new(options(&db, &folder).shutdown_grace_period(Duration::ZERO)).await;
    until("it runs", async || processes(&folder, 1)).await;
    started.stop().await;
    for words in ["tidying up", "was at row 7"] {
        assert!(log.line(words).is_some_and(|line| line.contains("job_id=1")), "{}", log.text());
    }
    assert!(folder.beside("tidy").exists());
}

#[tokio::test]
async fn a_stopping_worker_unlocks_a_queue_only_after_its_program_has_ended() {
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script(
        "alone",
        "mkdir \"$OUT/running\" || { echo two >> \"$OUT/overlap\"; exit 0; }
         if mkdir \"$OUT/first\"; then
           trap 'for n in $(seq 20); do sleep 0.05; done; rmdir \"$OUT/running\"; exit 1' TERM
           echo $$ > \"$OUT/pids\"
           while :; do sleep 0.02; done
         fi
         rmdir \"$OUT/running\"",
    );
    let options = || {
        options(&db, &folder)
            .poll_interval(Duration::from_millis(20))
            .shutdown_grace_period(Duration::ZERO)
            .interrupted_job_retry_delay(Duration::ZERO)
    };
    db.add_job("'alone', queue_name := 'q'").await;
    db.add_job("'alone', queue_name := 'q'").await;
    let first = Started::new(options()).await;
    until("it runs", async || processes(&folder, 1)).await;
    let second = Started::new(options()).await;
    first.stop().await;
    until("all are done", async || (count(&db).await == 0).then_some(())).await;
    second.stop().await;
    assert_eq!(folder.text("overlap"), "");
}

#[tokio::test]
async fn kill_programs_kills_running_programs_without_the_worker() {
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script("hangs", "trap '' TERM; sleep 1000 & echo $! >> \"$OUT/pids\"; echo $$ >> \"$OUT/pids\"; wait; wait");
    db.add_job("'hangs'").await;
    let started = Started::new(options(&db, &folder)).await;
    let pids = until("it runs", async || processes(&folder, 2)).await;
    started.worker.kill_programs();
    // This loop blocks the only thread of the runtime, so the worker cannot end the programs.
    let patience = Instant::now() + PATIENCE;
    while pids.iter().any(is_alive) {
        assert!(Instant::now() < patience, "{pids:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    let error = "select last_error from graphile_worker.jobs where locked_by is null";
    let error = until("the job has failed", async || db.rows(error).await.pop()).await;
    assert_eq!(error["last_error"], "killed by signal 9 (SIGKILL)");
    started.stop().await;
}

#[tokio::test]
async fn a_program_that_ignores_sigterm_is_killed() {
    let db = Db::installed().await;
    let folder = Folder::new();
    let stubborn = "trap '' TERM; sh -c 'trap \"\" TERM; echo $$ >> \"$0/pids\"; while :; do sleep 1; done' \"$OUT\" & echo $$ >> \"$OUT/pids\"; while :; do sleep 1; done";
    folder.script("stubborn", stubborn);
    db.add_job("'stubborn'").await;
    let worker = options(&db, &folder)
        .task_options("stubborn", TaskOptions::default().timeout(Duration::from_millis(500)))
        .init()
        .await
        .unwrap();
    worker.run_once().await.unwrap();
    let pids = processes(&folder, 2).unwrap();
    until("they are gone", async || pids.iter().all(|pid| !is_alive(pid)).then_some(())).await;
}

#[tokio::test]
async fn a_stopping_worker_lets_programs_finish() {
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script(
        "slow",
        "echo $$ > \"$OUT/pids\"; while [ ! -e \"$OUT/go\" ]; do sleep 0.02; done; echo done > \"$OUT/done\"",
    );
    db.add_job("'slow'").await;
    let started = Started::new(options(&db, &folder).shutdown_grace_period(Duration::from_secs(60))).await;
    until("it runs", async || processes(&folder, 1)).await;
    started.worker.request_shutdown();
    std::fs::write(folder.beside("go"), "").unwrap();
    started.running.await.unwrap().unwrap();
    assert_eq!((folder.text("done").trim(), count(&db).await), ("done", json!(0)));
}

#[tokio::test]
async fn after_the_grace_period_programs_are_stopped_and_their_jobs_released() {
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script("hangs", "sleep 1000 & echo $! >> \"$OUT/pids\"; echo $$ >> \"$OUT/pids\"; wait");
    db.add_job("'hangs'").await;
    let started = Started::new(options(&db, &folder).shutdown_grace_period(Duration::ZERO)).await;
    let pids = until("it runs", async || processes(&folder, 2)).await;
    started.stop().await;
    assert!(pids.iter().all(|pid| !is_alive(pid)), "{pids:?}");
    let job = db.row("select attempts, locked_by, last_error from graphile_worker.jobs").await;
    assert_eq!((&job["attempts"], &job["locked_by"]), (&json!(0), &Value::Null), "{job}");
}

#[tokio::test]
async fn a_second_shutdown_request_kills_programs_at_once() {
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script("stubborn", "trap '' TERM; echo $$ > \"$OUT/pids\"; while :; do sleep 1; done");
    db.add_job("'stubborn'").await;
    let started = Started::new(options(&db, &folder).shutdown_grace_period(Duration::from_secs(3600))).await;
    let pids = until("it runs", async || processes(&folder, 1)).await;
    started.worker.request_shutdown();
    tokio::time::timeout(PATIENCE, started.stop()).await.expect("it does not wait for the grace period");
    assert!(pids.iter().all(|pid| !is_alive(pid)), "{pids:?}");
}

#[tokio::test]
async fn dropping_the_worker_ends_its_programs() {
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script("hangs", "trap '' TERM; sleep 1000 & echo $! >> \"$OUT/pids\"; echo $$ >> \"$OUT/pids\"; wait; wait");
    db.add_job("'hangs'").await;
    let started = Started::new(options(&db, &folder)).await;
    let pids = until("it runs", async || processes(&folder, 2)).await;
    started.running.abort();
    until("they are gone", async || pids.iter().all(|pid| !is_alive(pid)).then_some(())).await;
}

#[tokio::test]
async fn shutting_down_the_runtime_ends_its_programs() {
    let folder = Folder::new();
    folder.script("hangs", "trap '' TERM; sleep 1000 & echo $! >> \"$OUT/pids\"; echo $$ >> \"$OUT/pids\"; wait; wait");
    let db = Db::installed().await;
    db.add_job("'hangs'").await;
    let (url, tasks) = (db.url().to_owned(), folder.tasks());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().worker_threads(1).build().unwrap();
    runtime.spawn(async move {
        let options = WorkerOptions::default()
            .database_url(&url)
            .listen_os_shutdown_signals(false)
            .task_source(TasksDir::new(tasks));
        options.init().await.unwrap().run().await
    });
    let pids = until("it runs", async || processes(&folder, 2)).await;
    runtime.shutdown_background();
    until("they are gone", async || pids.iter().all(|pid| !is_alive(pid)).then_some(())).await;
}

/// The resident memory of this process, in megabytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() / 1024
}

#[tokio::test]
async fn endless_output_neither_fills_memory_nor_floods_the_log() {
    let (log, _logging) = Log::start();
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script(
        "floods",
        "yes 'a line of some length, so that it adds up' | head -c 60000000; head -c 60000000 /dev/zero; exit 1",
    );
    db.add_job("'floods'").await;
    let before = resident();
    run_once(&db, &folder).await;
    let grown = resident().saturating_sub(before);
    assert!(grown < 100, "{grown} MB more for 120 MB of output");
    assert_eq!(last_error(&db).await, "exited with code 1");
    assert!(log.line("lines dropped").is_some());
    assert!(log.text().len() < 20_000_000, "{} bytes in the log", log.text().len());
}

#[tokio::test]
async fn twenty_four_concurrent_programs_run_400_jobs() {
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script("count", "read line; echo \"$line\" >> \"$OUT/lines\"");
    db.run("select graphile_worker.add_job('count', json_build_object('n', n)) from generate_series(1, 400) n").await;
    options(&db, &folder).concurrency(24).init().await.unwrap().run_once().await.unwrap();
    let mut lines: Vec<String> = folder.text("lines").lines().map(str::to_owned).collect();
    lines.sort();
    lines.dedup();
    assert_eq!((lines.len(), count(&db).await), (400, json!(0)));
}

#[tokio::test]
async fn a_program_may_ignore_its_input() {
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script("ignores", "exit 0");
    folder.script("closes", "exec 0<&-; echo heard; exit 0");
    folder.script("sleeps", "sleep 0.5");
    for task in ["ignores", "closes", "sleeps"] {
        db.add_job(&format!("'{task}', json_build_object('large', repeat('x', 5000000))")).await;
    }
    run_once(&db, &folder).await;
    assert_eq!(count(&db).await, 0);
    folder.write(
        "reads.py",
        &format!(
            "#!/usr/bin/env python3\nimport json, sys\nopen('{}', 'w').write(str(len(json.load(sys.stdin)['payload']['large'])))\n",
            folder.beside("length").display()
        ),
        0o755,
    );
    db.add_job("'reads', json_build_object('large', repeat('x', 5000000))").await;
    run_once(&db, &folder).await;
    assert_eq!((folder.text("length").as_str(), count(&db).await), ("5000000", json!(0)));
}

#[tokio::test]
async fn child_processes_do_not_keep_a_job_running() {
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script("holds", "sleep 1000 & echo $! > \"$OUT/pids\"; exit 0");
    folder.script("detaches", "sleep 1000 > /dev/null 2>&1 < /dev/null & echo $! > \"$OUT/detached\"; exit 0");
    db.add_job("'holds'").await;
    db.add_job("'detaches'").await;
    run_once(&db, &folder).await;
    assert_eq!(count(&db).await, 0);
    assert!(!is_alive(folder.text("pids").trim()), "it held the output");
    let detached = folder.text("detached");
    assert!(is_alive(detached.trim()), "a process that does not hold the output is left alone");
    std::process::Command::new("kill").arg(detached.trim()).status().unwrap();
}

#[tokio::test]
async fn tasks_are_named_after_their_paths_and_other_files_are_reported() {
    let (log, _logging) = Log::start();
    let db = Db::installed().await;
    let folder = Folder::new();
    let say = "echo $GRAPHILE_WORKER_TASK_IDENTIFIER >> \"$OUT/ran\"";
    for task in ["plain", "mail/daily/send.sh", "dotted.tar.sh", "twice", "twice.sh", "outside"] {
        folder.script(task, say);
    }
    std::fs::rename(folder.tasks().join("outside"), folder.beside("outside")).unwrap();
    symlink(folder.beside("outside"), folder.tasks().join("linked")).unwrap();
    symlink("nowhere", folder.tasks().join("broken")).unwrap();
    symlink(".", folder.tasks().join("around")).unwrap();
    folder.script(".hidden", say);
    folder.script(".git/hook", say);
    folder.script("node_modules/tool", say);
    folder.script(&"x".repeat(129), say);
    folder.script("odd name", say);
    folder.write("README.md", "read me", 0o644);
    folder.write("plain.sql", "select 1", 0o644);
    folder.write("script.mjs", "export default () => {}", 0o755);
    folder.write("both.js", "module.exports = () => {}", 0o644);
    folder.script("both.sh", say);
    let names = ["plain", "mail/daily/send", "dotted", "twice", "linked"];
    for name in names {
        db.add_job(&format!("'{name}'")).await;
    }
    run_once(&db, &folder).await;
    assert_eq!(count(&db).await, 0);
    let mut ran: Vec<String> = folder.text("ran").lines().map(str::to_owned).collect();
    ran.sort();
    assert_eq!(ran, ["dotted", "linked", "mail/daily/send", "plain", "twice"]);
    let warning = log.lines("a file in the tasks folder is not a task");
    for part in [
        "file=README.md problem=\"has no run bit: chmod +x it if it is a task\"",
        "file=broken problem=\"is a broken symbolic link",
        "file=around problem=\"is a symbolic link to a folder",
        "file=twice.sh problem=\"twice is ",
        "has a name of 129 characters",
        "file=odd name problem=\"has characters in its name",
        "file=both.sh problem=\"both is ",
    ] {
        assert!(warning.contains(part), "{part} is not in {warning}");
    }
    for part in [".hidden", ".git", "node_modules", "plain.sql"] {
        assert!(!warning.contains(part), "{part} is in {warning}");
    }
}

#[tokio::test]
async fn a_task_in_code_takes_precedence_over_a_file_of_its_name() {
    let (log, _logging) = Log::start();
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script("both", "exit 1");
    folder.script("shell", "exit 0");
    db.add_job("'both'").await;
    db.add_job("'shell'").await;
    let worker = options(&db, &folder).define_task("both", |_: Value, _| async {}).init().await.unwrap();
    worker.run_once().await.unwrap();
    assert_eq!(count(&db).await, 0);
    assert!(log.line("file=both problem=\"both is defined in code\"").is_some());
}

#[tokio::test]
async fn the_error_of_a_program_that_cannot_start_has_the_reason() {
    let (log, _logging) = Log::start();
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.write("t", "#!/does/not/exist -x\necho hello\n", 0o755);
    db.add_job("'t'").await;
    run_once(&db, &folder).await;
    let error = last_error(&db).await;
    assert!(
        error.ends_with("its first line, \"#!/does/not/exist -x\", names an interpreter that does not exist"),
        "{error}"
    );
    assert!(log.line("the task will fail").is_some(), "the problem is logged when the worker starts");

    let again = "update graphile_worker._private_jobs set run_at = now()";
    let worker = options(&db, &folder).init().await.unwrap();
    std::fs::remove_file(folder.tasks().join("t")).unwrap();
    db.run(again).await;
    worker.run_once().await.unwrap();
    assert!(last_error(&db).await.ends_with("the file is gone"));

    folder.write("t", "\0\0 no program", 0o755);
    db.run(again).await;
    run_once(&db, &folder).await;
    assert!(last_error(&db).await.ends_with("it is neither a program for this machine nor a script"));

    folder.write("t", "exit 5", 0o755);
    db.run(again).await;
    run_once(&db, &folder).await;
    assert_eq!(last_error(&db).await, "exited with code 5", "the shell runs a file without an interpreter line");
}

#[tokio::test]
async fn starting_a_program_that_is_being_written_is_retried() {
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script("t", "exit 0");
    let path = folder.tasks().join("t");
    let writing = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    if std::process::Command::new(&path).status().is_ok() {
        // This system runs files that are open for writing.
        return;
    }
    db.add_job("'t'").await;
    run_once(&db, &folder).await;
    let error = last_error(&db).await;
    assert!(error.contains("tried for 2s: ") && error.contains("busy"), "{error}");

    let again = "update graphile_worker._private_jobs set run_at = now()";
    db.run(again).await;
    let started = Started::new(options(&db, &folder)).await;
    until("it is tried", async || (db.value("select attempts from graphile_worker.jobs").await == 2).then_some(()))
        .await;
    drop(writing);
    until("it is done", async || (count(&db).await == 0).then_some(())).await;
    started.stop().await;
}

#[tokio::test]
async fn a_missing_or_invalid_tasks_folder_is_an_error() {
    let db = Db::installed().await;
    let folder = Folder::new();
    let error = async |path: PathBuf| {
        options(&db, &folder).task_source(TasksDir::new(path)).init().await.err().unwrap().to_string()
    };
    let missing = folder.beside("missing");
    assert_eq!(error(missing.clone()).await, format!("the tasks folder {} does not exist", missing.display()));
    folder.script("file", "");
    let file = folder.tasks().join("file");
    assert_eq!(error(file.clone()).await, format!("the tasks folder {} is a file, expected a folder", file.display()));
}

#[tokio::test]
async fn a_task_added_while_the_worker_runs_gets_its_jobs() {
    let (log, _logging) = Log::start();
    let db = Db::installed().await;
    let folder = Folder::new();
    db.add_job("'mail/new'").await;
    let started = Started::new(options(&db, &folder).watch(true).heartbeat_interval(Duration::from_secs(60))).await;
    folder.script("mail/new.sh", "echo one >> \"$OUT/ran\"");
    until("its job is done", async || (count(&db).await == 0).then_some(())).await;
    db.add_job("'mail/new'").await;
    until("the next one is done", async || (folder.text("ran") == "one\none\n").then_some(())).await;
    let known = "select tasks from graphile_worker._rs_workers";
    until("the worker has stored its tasks", async || (db.value(known).await == json!(["mail/new"])).then_some(()))
        .await;
    let change = log.line("task changed").unwrap();
    assert!(change.contains("task_identifier=\"mail/new\" change=\"added\""), "{change}");
    started.stop().await;
}

#[tokio::test]
async fn the_next_job_runs_the_changed_program_and_the_running_job_continues() {
    let (log, _logging) = Log::start();
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script(
        "t",
        "echo $$ > \"$OUT/pids\"; while [ ! -e \"$OUT/go\" ]; do sleep 0.02; done; echo old >> \"$OUT/ran\"",
    );
    db.add_job("'t'").await;
    let started = Started::new(options(&db, &folder).watch(true)).await;
    until("it runs", async || processes(&folder, 1)).await;
    folder.script("t", "echo new >> \"$OUT/ran\"");
    log.logged("change=\"changed\"", 1).await;
    db.add_job("'t'").await;
    until("the new one has run", async || (folder.text("ran") == "new\n").then_some(())).await;
    std::fs::write(folder.beside("go"), "").unwrap();
    until("the old one has run", async || (folder.text("ran") == "new\nold\n").then_some(())).await;
    until("both are done", async || (count(&db).await == 0).then_some(())).await;
    started.stop().await;
}

#[tokio::test]
async fn jobs_of_a_removed_task_wait_until_the_task_is_added_again() {
    let (log, _logging) = Log::start();
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script("t", "echo $$ > \"$OUT/pids\"; while [ ! -e \"$OUT/go\" ]; do sleep 0.02; done");
    folder.script("other", "exit 0");
    db.add_job("'t'").await;
    let started = Started::new(options(&db, &folder).watch(true)).await;
    until("it runs", async || processes(&folder, 1)).await;
    std::fs::remove_file(folder.tasks().join("t")).unwrap();
    log.logged("change=\"removed\"", 1).await;
    let late = db.add_job("'t'").await["id"].clone();
    db.add_job("'other'").await;
    std::fs::write(folder.beside("go"), "").unwrap();
    until("all others are done", async || (count(&db).await == 1).then_some(())).await;
    let left = db.row("select id, attempts, locked_by, last_error from graphile_worker.jobs").await;
    assert_eq!(left, json!({"id": late, "attempts": 0, "locked_by": null, "last_error": null}));
    folder.script("t", "exit 0");
    until("it is done", async || (count(&db).await == 0).then_some(())).await;
    started.stop().await;
}

#[tokio::test]
async fn removing_a_task_under_load_loses_no_job() {
    let (log, _logging) = Log::start();
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script("t", "exit 0");
    db.run("select graphile_worker.add_job('t', queue_name := case when n % 3 = 0 then 'q' || n % 2 end) from generate_series(1, 300) n").await;
    let started = Started::new(options(&db, &folder).watch(true)).await;
    until("some are done", async || (count(&db).await.as_i64() < Some(290)).then_some(())).await;
    // Jobs that start before the worker notices the change fail.
    let path = folder.tasks().join("t");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    log.logged("change=\"removed\"", 1).await;
    let locked = "select count(*) from graphile_worker.jobs where locked_by is not null";
    until("none is held", async || (db.value(locked).await == 0).then_some(())).await;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
    until("all are done", async || {
        db.run("update graphile_worker._private_jobs set run_at = now() where locked_by is null and run_at > now()")
            .await;
        (count(&db).await == 0).then_some(())
    })
    .await;
    started.stop().await;
}

#[tokio::test]
async fn tasks_are_unavailable_while_their_folder_is_missing() {
    let (log, _logging) = Log::start();
    let db = Db::installed().await;
    let folder = Folder::new();
    folder.script("t", "exit 0");
    let started = Started::new(options(&db, &folder).watch(true)).await;
    std::fs::rename(folder.tasks(), folder.beside("elsewhere")).unwrap();
    log.logged("change=\"removed\"", 1).await;
    assert!(log.line("does not exist").is_some(), "{}", log.text());
    db.add_job("'t'").await;
    std::fs::rename(folder.beside("elsewhere"), folder.tasks()).unwrap();
    until("it is done", async || (count(&db).await == 0).then_some(())).await;
    started.stop().await;
}

#[tokio::test]
async fn unknown_tasks_of_crontab_items_are_logged_after_every_change() {
    let (log, _logging) = Log::start();
    let db = Db::installed().await;
    let folder = Folder::new();
    let crontab = folder.beside("crontab");
    folder.script("t", "exit 0");
    std::fs::write(&crontab, "0 4 * * * t\n0 5 * * * missing").unwrap();
    let unknown = "this worker does not define the task of a crontab item";
    let found = "this worker now defines the task of a crontab item";
    let started = Started::new(options(&db, &folder).crontab_file(&crontab).watch(true)).await;
    log.logged(unknown, 1).await;

    // The task changes, but the set of tasks does not: nothing is logged.
    folder.script("t", "exit 0 # edited");
    log.logged("change=\"changed\"", 1).await;

    std::fs::write(&crontab, "0 4 * * * t\n0 5 * * * missing\n0 6 * * * other ?id=one").unwrap();
    log.logged(unknown, 1 + 2).await;
    folder.script("unrelated", "exit 0");
    log.logged(unknown, 1 + 2 + 2).await;
    folder.script("missing", "exit 0");
    log.logged(unknown, 1 + 2 + 2 + 1).await;
    std::fs::remove_file(folder.tasks().join("missing")).unwrap();
    log.logged(unknown, 1 + 2 + 2 + 1 + 2).await;
    started.stop().await;

    let count = |text: &str| log.lines(unknown).lines().filter(|line| line.contains(text)).count();
    let [missing, other] = ["task_identifier=\"missing\" item=\"missing\"", "task_identifier=\"other\" item=\"one\""];
    assert_eq!((count(missing), count(other), count("")), (4, 4, 8), "{}", log.text());
    let found = log.lines(found);
    assert!(found.lines().count() == 1 && found.contains(missing), "{}", log.text());
}
