//! How hosts end while the worker runs: they exit, crash, hang, or use too much memory. `host_crashes` tests what
//! happens to the other jobs of a host.

use crate::helpers::{Project, failed, gone, is_alive, jobs, last_error, options, run_once};
use crate::support::{Db, Started, until};
use graphile_worker::TaskOptions;
use graphile_worker_scripts::{HostOptions, TasksDir};
use std::time::Duration;

#[tokio::test]
async fn a_task_that_exits_the_process_fails_only_its_own_job() {
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
async fn jobs_that_finished_before_the_host_exited_stay_finished() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("quick.js", "module.exports = () => {};");
    project.task("exits.js", "module.exports = () => process.exit(0);");
    // The host reads all jobs at once, and the last one exits the process.
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
async fn no_job_is_lost_if_hosts_are_killed_under_load() {
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
async fn the_error_of_a_job_names_the_signal_that_killed_its_host() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("kills.js", "module.exports = () => { process.kill(process.pid, 'SIGKILL'); };");
    db.add_job("'kills'").await;
    run_once(&db, &project).await;
    let error = "the host process of this task was killed by signal 9 while this job ran alone in it";
    assert_eq!(last_error(&db).await, error);
}

#[tokio::test]
async fn a_host_that_hangs_after_a_timeout_is_killed_and_replaced() {
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
async fn a_host_with_a_job_that_ignores_its_abort_ends_after_the_other_jobs() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "ignores_abort.js",
        "module.exports = () => { note('pid', process.pid); return new Promise(() => setInterval(() => {}, 1000)); };",
    );
    project.task("slow.js", "module.exports = async () => { note('slow', process.pid); while (!require('fs').existsSync(OUT + '/go')) await new Promise((r) => setTimeout(r, 10)); };");
    project.task("fine.js", "module.exports = () => note('fine', process.pid);");
    let limited = TaskOptions::default().timeout(Duration::from_millis(100));
    let started = Started::new(options(&db, &project).task_options("ignores_abort", limited)).await;
    db.add_job("'slow'").await;
    let slow = project.noted("slow", 1).await;
    db.add_job("'ignores_abort', max_attempts := 1").await;
    failed(&db, 1).await;
    assert_eq!(project.notes("pid"), slow, "the same host");
    // The host gets no more jobs,
    let mut added = 0;
    until("another host runs jobs", async || {
        db.add_job("'fine'").await;
        added += 1;
        Some(()).filter(|()| !project.notes("fine").is_empty() && *project.notes("fine").last().unwrap() != slow[0])
    })
    .await;
    // but its other job continues.
    assert!(is_alive(&slow[0]));
    project.file("go", "");
    gone(&slow[0]).await;
    let left = until("the other jobs are done", async || Some(jobs(&db).await).filter(|jobs| jobs.len() == 1)).await;
    assert_eq!(left[0]["task_identifier"], "ignores_abort");
    started.stop().await;
    assert!(added > 0);
}

#[tokio::test]
async fn a_host_that_exceeds_its_memory_limit_is_killed() {
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
    assert!(error.ends_with("MiB of memory; the limit is 256 MiB"), "{error}");
}

#[tokio::test]
async fn an_ended_host_gets_no_jobs_if_a_child_process_keeps_its_socket_open() {
    let db = Db::installed().await;
    let project = Project::new();
    // Python, because it can pass the socket on to a child process.
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
