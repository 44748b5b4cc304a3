//! Several worker processes at once, and a server that crashes under them. A process is this test binary, started
//! again to run `worker_process` alone; it writes what it ran into a file, a line a run.

use crate::support::{Db, until};
use graphile_worker::{
    JobSpec, RawJobSpec, TaskError, TaskOptions, WorkerContext, WorkerOptions, WorkerShutdown, WorkerUtils,
};
use graphile_worker_devdb::ClusterOptions;
use serde_json::{Value, json};
use sqlx::PgPool;
use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A folder for what processes write.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("gw-processes-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    fn lines(&self) -> Vec<String> {
        let files = std::fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path());
        let logs = files.filter(|path| path.extension().is_some_and(|extension| extension == "log"));
        logs.flat_map(|path| std::fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect::<Vec<_>>())
            .collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn start_process(url: &str, folder: &Path, number: usize) -> Child {
    process_command(url, folder, number).spawn().unwrap()
}

fn process_command(url: &str, folder: &Path, number: usize) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "processes::worker_process", "--nocapture"])
        .env("GW_TEST_URL", url)
        .env("GW_TEST_FOLDER", folder)
        .env("GW_TEST_NUMBER", number.to_string())
        .stdout(std::process::Stdio::null());
    command
}

/// One worker process: until there are no jobs left, those included that wait for a retry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_process() {
    let Ok(url) = std::env::var("GW_TEST_URL") else { return };
    let folder = PathBuf::from(std::env::var_os("GW_TEST_FOLDER").unwrap());
    let number: i32 = std::env::var("GW_TEST_NUMBER").unwrap().parse().unwrap();
    let log = std::fs::File::create(folder.join(format!("{number}.log"))).unwrap();
    let log = Arc::new(Mutex::new(std::io::BufWriter::new(log)));
    let pool = PgPool::connect(&url).await.unwrap();
    let (written, locks) = (log.clone(), folder.clone());
    let (mine, mine_written) = (folder.clone(), log.clone());
    let begins = folder.clone();
    let mut options = WorkerOptions::default();
    let is_mortal = std::env::var_os("GW_TEST_MORTAL").is_some();
    if is_mortal {
        options = options
            .heartbeat_interval(Duration::from_millis(200))
            .sweep_interval(Duration::from_millis(300))
            .sweep_threshold(
                std::env::var("GW_TEST_THRESHOLD")
                    .map_or(Duration::from_secs(5), |seconds| Duration::from_secs(seconds.parse().unwrap())),
            )
            .recovery_delay(Duration::ZERO);
    }
    if std::env::var_os("GW_TEST_REPEATABLE").is_some() {
        for task in ["sometimes", "mortal", "poison", "writes"] {
            options = options.task_options(task, TaskOptions::default().repeatable(true));
        }
    }
    if std::env::var_os("GW_TEST_LONG_BATCHES").is_some() {
        options = options.longest_batch(Duration::from_secs(3600));
    }
    let worker = options
        .pg_pool(pool.clone())
        .concurrency(16)
        .poll_interval(Duration::from_millis(100))
        .listen_os_shutdown_signals(false)
        // Fails one attempt in ten.
        .define_task("sometimes", move |_: Value, ctx: WorkerContext| {
            let (id, attempt) = (ctx.job().id, ctx.job().attempts);
            let fails = (id.wrapping_mul(2_654_435_761) >> 7).wrapping_add(i64::from(attempt)) % 10 == 0;
            writeln!(written.lock().unwrap(), "{id} {attempt} {}", if fails { "failed" } else { "done" }).unwrap();
            async move { if fails { Err(TaskError::retry_after(Duration::ZERO, "bad luck")) } else { Ok(()) } }
        })
        // Holds a lock on the queue's file while it runs: no other process can have it.
        .define_task("alone", move |queue: String, ctx: WorkerContext| {
            let file = std::fs::File::create(locks.join(queue)).unwrap();
            let log = log.clone();
            async move {
                let alone = file.try_lock().is_ok();
                tokio::task::yield_now().await;
                writeln!(log.lock().unwrap(), "{} {alone}", ctx.job().id).unwrap();
            }
        })
        // Holds a lock on the job's file while it runs, and says at once what it has done.
        .define_task("mortal", move |_: Value, ctx: WorkerContext| {
            let id = ctx.job().id;
            let file = std::fs::File::create(mine.join(format!("job-{id}"))).unwrap();
            let log = mine_written.clone();
            async move {
                let alone = file.try_lock().is_ok();
                tokio::time::sleep(Duration::from_millis(5)).await;
                let mut log = log.lock().unwrap();
                writeln!(log, "{id} {alone}").unwrap();
                log.flush().unwrap();
            }
        })
        // Writes on request, together with its own completion.
        .define_task("writes", move |_: Value, ctx: WorkerContext| {
            let (begun, told) = (begins.join(format!("begun-{number}")), begins.join("write"));
            async move {
                std::fs::write(begun, "").unwrap();
                while !told.exists() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                let mut transaction = ctx.pg_pool().begin().await.unwrap();
                let write = "insert into written values ($1, $2)";
                sqlx::query(write).bind(ctx.job().id).bind(number).execute(&mut *transaction).await.unwrap();
                ctx.complete_in(transaction).await
            }
        })
        .define_task("poison", |_: Value, _| async {
            let die: fn() = || std::process::abort();
            die();
        })
        .define_task("stamp", |_: Value, ctx: WorkerContext| async move {
            let local = chrono::Utc::now();
            let stamp = "insert into stamps values (clock_timestamp(), $1)";
            sqlx::query(stamp).bind(local).execute(ctx.pg_pool()).await.unwrap();
        })
        .init()
        .await
        .unwrap();
    let left = "select count(*) from graphile_worker.jobs where attempts < max_attempts or locked_by is not null";
    if is_mortal {
        let worker = Arc::new(worker);
        let running = tokio::spawn({
            let worker = worker.clone();
            async move { worker.run().await }
        });
        while sqlx::query_scalar::<_, i64>(left).fetch_one(&pool).await.unwrap() > 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        worker.request_shutdown();
        return running.await.unwrap().unwrap();
    }
    while sqlx::query_scalar::<_, i64>(left).fetch_one(&pool).await.unwrap() > 0 {
        worker.run_once().await.unwrap();
        tokio::task::yield_now().await;
    }
}

fn wait_for(processes: Vec<Child>) {
    for mut process in processes {
        assert!(process.wait().unwrap().success());
    }
}

/// Whether the tasks of a process are repeatable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Claims {
    Written,
    Deferred,
    /// However long the jobs run.
    DeferredForLong,
}

impl Claims {
    fn of(self, command: &mut Command) -> &mut Command {
        match self {
            Claims::Written => command,
            Claims::Deferred => command.env("GW_TEST_REPEATABLE", "1"),
            Claims::DeferredForLong => command.env("GW_TEST_REPEATABLE", "1").env("GW_TEST_LONG_BATCHES", "1"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_thousand_jobs_over_four_processes_each_end_once() {
    each_ends_once(Claims::Written).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_thousand_repeatable_jobs_over_four_processes_each_end_once_if_no_connection_is_lost() {
    each_ends_once(Claims::Deferred).await;
}

async fn each_ends_once(claims: Claims) {
    let db = Db::installed().await;
    let folder = Folder::new(&format!("sometimes-{claims:?}"));
    db.run("select count(*) from graphile_worker.add_jobs((select array_agg(('sometimes', '{}', null, null, null, null, null, null)::graphile_worker.job_spec) from generate_series(1, 100000)))").await;
    let start = |number| claims.of(&mut process_command(db.url(), &folder.0, number)).spawn().unwrap();
    wait_for((0..4).map(start).collect());

    let mut runs = HashSet::new();
    let mut done: HashMap<i64, u32> = HashMap::new();
    for line in folder.lines() {
        let (run, result) = line.rsplit_once(' ').unwrap();
        assert!(runs.insert(run.to_owned()), "attempt `{run}` ran twice");
        if result == "done" {
            *done.entry(run.split(' ').next().unwrap().parse().unwrap()).or_default() += 1;
        }
    }
    assert_eq!(done.len(), 100_000);
    assert!(done.values().all(|times| *times == 1));
    assert!(runs.len() > 105_000, "some have failed and were tried again: {}", runs.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn named_queues_never_overlap_over_four_processes() {
    let db = Db::installed().await;
    let folder = Folder::new("alone");
    db.run("select count(*) from graphile_worker.add_jobs((select array_agg(('alone', to_json('queue' || n % 7), 'queue' || n % 7, null, null, null, null, null)::graphile_worker.job_spec) from generate_series(1, 3000) n))").await;
    wait_for((0..4).map(|number| start_process(db.url(), &folder.0, number)).collect());
    let lines = folder.lines();
    assert_eq!(lines.len(), 3000);
    let overlapping: Vec<&String> = lines.iter().filter(|line| !line.ends_with("true")).collect();
    assert!(overlapping.is_empty(), "{overlapping:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_survives_a_crash_of_the_server() {
    let folder = Folder::new("crash");
    let cluster = ClusterOptions::new(folder.0.join("db")).open().unwrap();
    let pool = PgPool::connect_with(cluster.options("postgres")).await.unwrap();
    let ran = Arc::new(Mutex::new(Vec::new()));
    let runs = ran.clone();
    let worker = Arc::new(
        WorkerOptions::default()
            .pg_pool(pool.clone())
            .concurrency(4)
            .listen_os_shutdown_signals(false)
            .define_task("t", move |n: i64, _| {
                runs.lock().unwrap().push(n);
                async {}
            })
            .init()
            .await
            .unwrap(),
    );
    let utils = WorkerUtils::new(pool.clone(), "graphile_worker");
    let jobs: Vec<RawJobSpec> = (0..20_000)
        .map(|n| RawJobSpec { identifier: "t".to_owned(), payload: json!(n), spec: JobSpec::default() })
        .collect();
    utils.add_raw_jobs(&jobs).await.unwrap();

    let running = tokio::spawn({
        let worker = worker.clone();
        async move { worker.run().await }
    });
    let count = || ran.lock().unwrap().len();
    until("2,000 jobs have run", async || (count() >= 2000).then_some(())).await;
    // One server process dies: PostgreSQL closes all connections and recovers.
    let pid: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&pool).await.unwrap();
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
    until("all jobs have run", async || (count() >= 20_000).then_some(())).await;
    worker.request_shutdown();
    running.await.unwrap().unwrap();
    let mut ran = ran.lock().unwrap().clone();
    ran.sort_unstable();
    assert_eq!(ran, (0..20_000).collect::<Vec<i64>>(), "every job ran, and none twice");
    let left: i64 = loop {
        let left = sqlx::query_scalar("select count(*) from graphile_worker._private_jobs").fetch_one(&pool).await;
        if let Ok(left) = left {
            break left;
        }
    };
    assert_eq!(left, 0);
    pool.close().await;
    cluster.stop().unwrap();
}

/// A worker process with one job that never ends, stopped by signals.
#[tokio::test]
async fn process_that_listens_to_signals() {
    let Ok(url) = std::env::var("GW_TEST_SIGNALS_URL") else { return };
    let says = |what: &str| {
        let folder = PathBuf::from(std::env::var_os("GW_TEST_FOLDER").unwrap());
        std::fs::write(folder.join(what), "").unwrap();
    };
    let worker = WorkerOptions::default()
        .database_url(&url)
        .shutdown_grace_period(Duration::from_secs(3600))
        .interrupted_job_retry_delay(Duration::from_secs(100))
        .on(WorkerShutdown, move |_| async move { says("stopping") })
        .define_task("for_ever", move |_: Value, _| async move {
            says("running");
            std::future::pending::<()>().await
        })
        .init()
        .await
        .unwrap();
    worker.run().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_signal_waits_for_jobs_and_the_second_interrupts_them() {
    let db = Db::installed().await;
    db.add_job("'for_ever'").await;
    let folder = Folder::new("signals");
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::process_that_listens_to_signals", "--nocapture"])
        .env("GW_TEST_SIGNALS_URL", db.url())
        .env("GW_TEST_FOLDER", &folder.0)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    // A claimed job that does not run yet would be released.
    until("the job runs", async || folder.0.join("running").exists().then_some(())).await;
    let signal = |name: &str| Command::new("kill").args([name, &process.id().to_string()]).status().unwrap();
    assert!(signal("-TERM").success());
    // Without this, the worker may claim the second job before the signal arrives.
    until("the process handles the signal", async || folder.0.join("stopping").exists().then_some(())).await;
    // The job continues, and the worker does not claim a new one. If this is too short, the test only shows less.
    let before = db.value("select locked_by from graphile_worker.jobs").await;
    db.add_job("'for_ever', job_key := 'second'").await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(process.try_wait().unwrap().is_none());
    assert_eq!(db.value("select locked_by from graphile_worker.jobs where key is null").await, before);
    assert_eq!(db.value("select locked_by from graphile_worker.jobs where key is not null").await, Value::Null);
    assert!(Command::new("kill").args(["-INT", &process.id().to_string()]).status().unwrap().success());
    assert!(process.wait().unwrap().success());
    let job = db.row("select attempts, locked_by, run_at > now() + interval '90 seconds' as later from graphile_worker.jobs where key is null").await;
    assert_eq!(job, json!({"attempts": 0, "locked_by": null, "later": true}));
}

/// A process that continues after its workers have ended. It creates the file `ready` when signals may come.
#[tokio::test]
async fn process_that_continues_after_its_worker() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(url) = std::env::var("GW_TEST_OUTLIVES_URL") else { return };
    let folder = PathBuf::from(std::env::var_os("GW_TEST_FOLDER").unwrap());
    let how = std::env::var("GW_TEST_HOW").unwrap();
    let says = |what: &str| std::fs::write(folder.join(what), "").unwrap();
    let options = || WorkerOptions::default().database_url(&url).define_task("t", |_: Value, _| async {});
    match &*how {
        "after an error" => {
            let worker = options().startup_timeout(Duration::ZERO).init().await.unwrap();
            let pool = PgPool::connect(&url).await.unwrap();
            sqlx::raw_sql("drop schema graphile_worker cascade").execute(&pool).await.unwrap();
            worker.run().await.unwrap_err();
        }
        "after it was dropped" => {
            let began = Arc::new(tokio::sync::Notify::new());
            let begins = began.clone();
            let begin = move |_: Value, _: WorkerContext| {
                begins.notify_one();
                async {}
            };
            let worker = options().define_task("begins", begin).init().await.unwrap();
            worker.create_utils().add_raw_job("begins", json!(null), JobSpec::default()).await.unwrap();
            tokio::select! {
                ended = worker.run() => panic!("{ended:?}"),
                () = began.notified() => {}
            }
        }
        "beside another" => {
            let another = options().init().await.unwrap();
            let running = tokio::spawn(async move { another.run().await });
            options().init().await.unwrap().run_once().await.unwrap();
            says("ready");
            running.await.unwrap().unwrap();
            says("stopped");
            std::future::pending().await
        }
        "which has a handler" => {
            let mut terminate = signal(SignalKind::terminate()).unwrap();
            options().init().await.unwrap().run_once().await.unwrap();
            says("ready");
            terminate.recv().await;
            std::process::exit(7)
        }
        "which listens itself" => {
            let worker = options().listen_os_shutdown_signals(false).init().await.unwrap();
            worker.run_once().await.unwrap();
            let mut terminate = signal(SignalKind::terminate()).unwrap();
            says("ready");
            terminate.recv().await;
            std::process::exit(7)
        }
        _ => unreachable!("{how}"),
    }
    says("ready");
    // No task of the runtime runs any more: signals must work all the same.
    std::thread::sleep(Duration::from_secs(600));
}

struct Outliving {
    process: Child,
    folder: Folder,
    _db: Db,
}

impl Outliving {
    async fn start(how: &str, name: &str, launcher: Option<&[&str]>) -> Outliving {
        let (db, folder) = (Db::installed().await, Folder::new(name));
        let this = std::env::current_exe().unwrap();
        let mut command = match launcher {
            None => Command::new(this),
            Some(launcher) => {
                let mut command = Command::new(launcher[0]);
                command.args(&launcher[1..]).arg(this);
                command
            }
        };
        command
            .args(["--exact", "processes::process_that_continues_after_its_worker", "--nocapture"])
            .env("GW_TEST_OUTLIVES_URL", db.url())
            .env("GW_TEST_FOLDER", &folder.0)
            .env("GW_TEST_HOW", how)
            .stdout(std::process::Stdio::null());
        let process = command.spawn().unwrap();
        let outliving = Outliving { process, folder, _db: db };
        outliving.until("ready").await;
        outliving
    }

    async fn until(&self, what: &str) {
        until(what, async || self.folder.0.join(what).exists().then_some(())).await;
    }

    fn signal(&self, signal: &str) {
        kill(signal, &self.process.id().to_string());
    }

    async fn end(mut self) -> std::process::ExitStatus {
        until("the process has ended", async || self.process.try_wait().unwrap()).await
    }
}

impl Drop for Outliving {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn kill(signal: &str, process: &str) {
    assert!(Command::new("kill").args([signal, process]).status().unwrap().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_ends_a_process_that_continues_after_its_worker() {
    for (signal, number) in [("-INT", 2), ("-TERM", 15), ("-HUP", 1)] {
        let process = Outliving::start("after an error", &format!("error{signal}"), None).await;
        process.signal(signal);
        assert_eq!(process.end().await.signal(), Some(number));
    }
    let process = Outliving::start("after it was dropped", "dropped", None).await;
    process.signal("-TERM");
    assert_eq!(process.end().await.signal(), Some(15));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_stops_the_workers_that_still_run_before_one_ends_the_process() {
    let process = Outliving::start("beside another", "beside", None).await;
    process.signal("-TERM");
    process.until("stopped").await;
    process.signal("-TERM");
    assert_eq!(process.end().await.signal(), Some(15));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_handles_signals_itself_keeps_its_handler_after_its_worker() {
    for (how, name) in [("which has a handler", "handler"), ("which listens itself", "itself")] {
        if how == "which has a handler" && !cfg!(target_os = "linux") {
            continue;
        }
        let process = Outliving::start(how, name, None).await;
        process.signal("-TERM");
        assert_eq!(process.end().await.code(), Some(7));
    }
}

/// The kernel ignores the default action of a signal for process 1.
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_ends_process_1_of_a_container_that_continues_after_its_worker() {
    if !Command::new("unshare").args(["--pid", "--fork", "true"]).status().is_ok_and(|status| status.success()) {
        return; // Only root can do this, and only on Linux.
    }
    let launcher = ["unshare", "--pid", "--fork", "--kill-child"];
    let process = Outliving::start("after an error", "process1", Some(&launcher)).await;
    let children = format!("/proc/{0}/task/{0}/children", process.process.id());
    kill("-TERM", std::fs::read_to_string(children).unwrap().trim());
    assert_eq!(process.end().await.code(), Some(128 + 15));
}

/// A library that shifts what a program takes for the time of day.
#[cfg(target_os = "linux")]
fn shifted_clock(folder: &Path, seconds: i64) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/shifted_clock.c");
    let library = folder.join("clock.so");
    let shift = format!("-DSHIFT={seconds}");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", &shift, "-o"]).arg(&library).arg(&source).arg("-ldl");
    assert!(compiler.status().unwrap().success());
    library
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_clock_is_an_hour_off_runs_jobs_when_they_are_due() {
    for seconds in [3600, -3600] {
        let db = Db::installed().await;
        let folder = Folder::new(&format!("clock{seconds}"));
        let clock = shifted_clock(&folder.0, seconds);
        db.run("create table stamps (at timestamptz, local timestamptz)").await;
        db.run("select graphile_worker.add_job('stamp', run_at := now() + interval '1 second')").await;
        let due = db.value("select run_at::text from graphile_worker.jobs").await;
        let mut process = process_command(db.url(), &folder.0, 0);
        wait_for(vec![process.env("LD_PRELOAD", clock).spawn().unwrap()]);
        let stamp = db
            .row(&format!(
                "select at >= '{due}' as not_early, at < timestamptz '{due}' + interval '1 minute' as not_late,
                   round(extract(epoch from local - at) / 60) as off from stamps",
                due = due.as_str().unwrap()
            ))
            .await;
        assert_eq!(stamp, json!({"not_early": true, "not_late": true, "off": seconds / 60}));
    }
}

fn start_mortal(url: &str, folder: &Path, number: usize, claims: Claims) -> Child {
    let mut command = process_command(url, folder, number);
    claims.of(&mut command).env("GW_TEST_MORTAL", "1").stderr(std::process::Stdio::null()).spawn().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_that_are_killed_lose_nothing_and_none_of_their_jobs_runs_twice_at_once() {
    nothing_is_lost(Claims::Written).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_of_repeatable_tasks_that_are_killed_lose_nothing() {
    nothing_is_lost(Claims::Deferred).await;
}

async fn nothing_is_lost(claims: Claims) {
    let db = Db::installed().await;
    let folder = Folder::new(&format!("mortal-{claims:?}"));
    db.run("select count(*) from graphile_worker.add_jobs((select array_agg(('mortal', '{}', case when n % 5 = 0 then 'q' || n % 50 end, null, null, null, null, null)::graphile_worker.job_spec) from generate_series(1, 10000) n))").await;
    let mut workers: Vec<Child> = (0..4).map(|number| start_mortal(db.url(), &folder.0, number, claims)).collect();
    let left = "select count(*) from graphile_worker._private_jobs";
    // Whenever some hundred jobs more are done, one is killed and another takes its place.
    for (number, fewer) in (4..12).zip([9500, 9000, 8500, 8000, 7500, 7000, 6500, 6000]) {
        until("some hundred jobs more have run", async || (db.value(left).await.as_i64()? <= fewer).then_some(()))
            .await;
        let victim = &mut workers[number % 4];
        victim.kill().unwrap();
        victim.wait().unwrap();
        *victim = start_mortal(db.url(), &folder.0, number, claims);
    }
    wait_for(workers);
    assert_eq!(db.value(left).await, 0);
    let lines = folder.lines();
    let done: HashSet<&str> = lines.iter().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(done.len(), 10_000, "every job has run");
    // The jobs of a batch are free as soon as the connection of a killed process is closed, which may be before its files
    // are. And if it held no written claim, the others are done before it counts as dead.
    if claims == Claims::Written {
        assert!(lines.iter().all(|line| line.ends_with(" true")), "none was anybody else's at that moment");
        assert_eq!(db.value("select count(*) from graphile_worker._rs_workers").await, 0, "the last have signed off");
    }
    assert_eq!(
        db.value("select count(*) from graphile_worker._private_job_queues where locked_by is not null").await,
        0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_kills_its_workers_is_quarantined_and_the_others_are_completed() {
    // Four that were refunded, then its two attempts.
    deaths_are_counted(Claims::Written, 6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeatable_job_that_kills_its_workers_is_quarantined_one_death_later() {
    // The first time, its claim was not written.
    deaths_are_counted(Claims::DeferredForLong, 7).await;
}

async fn deaths_are_counted(claims: Claims, expected: u32) {
    let db = Db::installed().await;
    let folder = Folder::new(&format!("poison-{claims:?}"));
    db.run("select graphile_worker.add_job('poison', max_attempts := 2, priority := -1); select graphile_worker.add_job('mortal') from generate_series(1, 200)")
        .await;
    let open = "select count(*) from graphile_worker.jobs where attempts < max_attempts or locked_by is not null";
    let mut number = 0;
    let mut deaths = 0;
    while db.value(open).await != 0 {
        let mut worker = start_mortal(db.url(), &folder.0, number, claims);
        deaths += u32::from(!worker.wait().unwrap().success());
        number += 1;
    }
    let job = "select json_build_array(attempts, left(last_error, 24)) from graphile_worker._private_jobs";
    assert_eq!(db.value(job).await, json!([2, "Its worker has died 6 ti"]));
    assert_eq!(deaths, expected);
    let lines = folder.lines();
    // One that had run when its worker died, and was not reported yet, runs again.
    let done: HashSet<&str> = lines.iter().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(done.len(), 200, "every other job has run");
}

/// Ended with the test, even if it stands still.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Ended {
    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.0.id().to_string()]).status().unwrap().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_frees_the_repeatable_jobs_of_a_suspended_worker() {
    let db = Db::installed().await;
    let folder = Folder::new("suspended");
    db.run("create table written (job bigint, worker int); select graphile_worker.add_job('writes')").await;
    let start = |number| {
        let mut command = process_command(db.url(), &folder.0, number);
        Ended(Claims::DeferredForLong.of(&mut command).env("GW_TEST_MORTAL", "1").spawn().unwrap())
    };
    let begun = async |number: i32| {
        let path = folder.0.join(format!("begun-{number}"));
        until("the job has begun", async || path.exists().then_some(())).await;
    };
    let suspended = start(0);
    begun(0).await;
    suspended.signal("-STOP");
    let _other = start(1);
    begun(1).await;
    std::fs::write(folder.0.join("write"), "").unwrap();
    let left = "select count(*) from graphile_worker._private_jobs";
    until("the job is done", async || (db.value(left).await == 0).then_some(())).await;
    assert_eq!(db.value("select json_agg(worker) from written").await, json!([1]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_suspended_for_longer_than_the_threshold_writes_nothing_twice_and_continues() {
    let db = Db::installed().await;
    let folder = Folder::new("stands-still");
    // The job of the future keeps the processes from ending.
    db.run(
        "create table written (job bigint, worker int);
         select graphile_worker.add_job('writes', '{}', 'q'), graphile_worker.add_job('writes', run_at := now() + '1 day')",
    )
    .await;
    let start = |number| {
        let mut command = process_command(db.url(), &folder.0, number);
        Ended(command.env("GW_TEST_MORTAL", "1").env("GW_TEST_THRESHOLD", "1").spawn().unwrap())
    };
    let begun = async |number: i32| {
        let path = folder.0.join(format!("begun-{number}"));
        until("the job has begun", async || path.exists().then_some(())).await;
    };
    let slow = start(0);
    begun(0).await;
    slow.signal("-STOP");
    let other = start(1);
    begun(1).await;
    std::fs::write(folder.0.join("write"), "").unwrap();
    let written = async || db.value("select count(*) from written").await;
    until("the job is written", async || (written().await == 1).then_some(())).await;
    slow.signal("-CONT");

    // It continues under another id, now that its registration is gone.
    other.signal("-KILL");
    db.run("select graphile_worker.add_job('writes', '{}', 'q')").await;
    let by_whom = "select json_agg(worker order by job) from written";
    until("the next job is written", async || (written().await == 2).then_some(())).await;
    assert_eq!(db.value(by_whom).await, json!([1, 0]), "each job is written once");
    let names = "select count(*) from graphile_worker._rs_workers";
    until("only one worker is registered", async || (db.value(names).await == 1).then_some(())).await;
}
