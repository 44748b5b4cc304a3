//! `make torture`: breaks workers, connections and the server under load, then checks what graphile_worker promises.
//!
//! A run: start a private server, a fleet of worker processes and the load; inflict faults; stop them; let the fleet
//! drain and idle; stop it; judge the records. All random choices come from one seed.

mod check;
mod faults;
mod fleet;
mod kept;
mod lacking;
mod limits;
mod load;
mod proxy;
mod record;
mod server;
mod worker;

use crate::check::{Cron, Ended, Evidence, Idle, Probe, Verdict};
use crate::faults::{Faults, Kind};
use crate::fleet::{Fleet, Shape, Supplies};
use crate::lacking::Skipped;
use crate::load::{Driver, Part};
use crate::proxy::Link;
use crate::record::{MILLISECOND, SECOND, lock, now};
use crate::server::Server;
use crate::worker::{WorkerArguments, cron_time};
use chrono::{TimeDelta, Utc};
use clap::Parser;
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::Instant;

type Failure = Box<dyn std::error::Error + Send + Sync>;

const DEFAULT_SECONDS: u64 = 60;

/// A run of this length or longer inflicts each kind of fault at least once.
const FULL_RUN: Duration = Duration::from_secs(60);

/// How long the fleet may take to finish what is left after the faults.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);

const IDLE_TIME: Duration = Duration::from_secs(5);

/// How long PgBouncer may take to answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Set in the process that has a mount namespace of its own.
const OWN_MOUNTS: &str = "GRAPHILE_WORKER_TORTURE_OWN_MOUNTS";

/// Breaks workers, connections and the server under load, and checks what graphile_worker promises.
#[derive(Debug, Parser)]
#[command(name = "torture", args_conflicts_with_subcommands = true)]
struct Arguments {
    /// Repeats the random choices of an earlier run (default: a new seed)
    #[arg(long)]
    seed: Option<u64>,
    /// How long the faults last, in minutes
    #[arg(long, conflicts_with = "seconds")]
    minutes: Option<u64>,
    /// How long the faults last, in seconds (default 60)
    #[arg(long)]
    seconds: Option<u64>,
    /// Which faults to inflict (default: all)
    #[arg(long, value_enum, value_delimiter = ',')]
    faults: Option<Vec<Kind>>,
    /// Parts of the load to leave out
    #[arg(long, value_enum, value_delimiter = ',')]
    without: Vec<Part>,
    /// How many worker processes run
    #[arg(long, default_value_t = 5)]
    workers: usize,
    /// Adds two of Node's workers
    #[arg(long)]
    node: bool,
    /// Runs what CI runs: some of the kept seeds for a short time, and one seed with Node's workers
    #[arg(long, conflicts_with_all = ["seed", "minutes", "seconds", "faults", "without", "node", "kept"])]
    short: bool,
    /// Runs every seed that ever failed (seeds.txt), with its options
    #[arg(long, conflicts_with_all = ["seed", "minutes", "seconds", "faults", "without", "node"])]
    kept: bool,
    /// Keeps the folder with all records even if no invariant is violated
    #[arg(long)]
    keep: bool,
    /// Lists the faults
    #[arg(long)]
    list: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// A worker process of a run
    #[command(hide = true)]
    Worker(WorkerArguments),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.list {
        for kind in Kind::ALL {
            println!("{:18}{}", name(kind), kind.does());
        }
        return ExitCode::SUCCESS;
    }
    match torture(arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("torture could not run: {error}");
            ExitCode::from(2)
        }
    }
}

/// As it is written on the command line.
fn name(value: impl clap::ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Returns whether all invariants hold.
fn torture(arguments: Arguments) -> Result<bool, Failure> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    // A worker process ends when the thread that started it ends, so no thread may end early.
    runtime.worker_threads(2).enable_all().thread_keep_alive(Duration::from_secs(7 * 24 * 3600));
    let runtime = runtime.build()?;
    if let Some(Command::Worker(worker)) = arguments.command {
        let ended = runtime.block_on(worker::run(worker));
        // The thread that reads standard input never ends.
        std::process::exit(match ended {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("the worker failed: {error}");
                1
            }
        });
    }
    let keep = arguments.keep;
    let mut runs = match &arguments {
        Arguments { short: true, .. } => kept::ci()?,
        Arguments { kept: true, .. } => kept::all()?,
        _ => vec![arguments],
    };
    if runs.iter().any(|run| run.wants(Kind::WalFull)) {
        restart_with_own_mounts()?;
    }
    let (count, mut failed) = (runs.len(), Vec::new());
    for run in &mut runs {
        run.keep |= keep;
        let (seed, length) = (run.seed.unwrap_or_else(|| fastrand::u64(..1_000_000)), run.length());
        if !runtime.block_on(one_seed(run, seed, length))? {
            failed.push(repeat(run, seed, length));
        }
    }
    if count > 1 {
        println!("{} of {count} runs passed", count - failed.len());
        for options in &failed {
            println!("  failed: make torture TORTURE=\"{options}\"");
        }
    }
    Ok(failed.is_empty())
}

impl Arguments {
    /// Whether faults of this kind are to occur.
    fn wants(&self, kind: Kind) -> bool {
        self.faults.as_ref().is_none_or(|kinds| kinds.contains(&kind))
    }

    /// How long the faults last.
    fn length(&self) -> Duration {
        let minutes = self.minutes.map(|minutes| minutes * 60);
        Duration::from_secs(minutes.or(self.seconds).unwrap_or(DEFAULT_SECONDS))
    }
}

/// The fault `wal-full` mounts a small disk. In a mount namespace of its own, nothing stays mounted whatever happens.
fn restart_with_own_mounts() -> Result<(), Failure> {
    if std::env::var_os(OWN_MOUNTS).is_some() || own_mounts().is_err() {
        return Ok(());
    }
    let mut again = std::process::Command::new("unshare");
    again.arg("--mount").arg(std::env::current_exe()?).args(std::env::args_os().skip(1)).env(OWN_MOUNTS, "1");
    Err(Box::new(std::os::unix::process::CommandExt::exec(&mut again)))
}

/// Whether this process may have mounts of its own.
fn own_mounts() -> Result<(), Skipped> {
    let what = "wal-full";
    if !rustix::process::getuid().is_root() {
        return Err(Skipped::not_allowed(what, "only root may mount the small disk that it fills"));
    }
    let unshared =
        std::process::Command::new("unshare").args(["--mount", "true"]).stderr(std::process::Stdio::null()).status();
    match unshared {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(Skipped::not_allowed(what, "this machine allows no mount namespace (`unshare --mount`)")),
        Err(error) => Err(Skipped::install(what, format!("`unshare` cannot be run ({error}): install util-linux"))),
    }
}

/// One run, from the start of the server to the verdict. Returns whether it passed.
async fn one_seed(arguments: &Arguments, seed: u64, length: Duration) -> Result<bool, Failure> {
    let folder = std::env::temp_dir().join(format!("gw-torture-{seed}-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    println!("seed {seed}, {} s of faults, records in {}", length.as_secs(), folder.display());
    let server = Arc::new(Server::start(&folder)?);
    let run = Run::start(arguments, seed, &folder, server.clone()).await;
    let story = async {
        let run = run?;
        let evidence = tokio::select! {
            evidence = run.story(arguments, length) => evidence,
            _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
            ended = run.fleet.watch() => Err(ended.err().unwrap_or_else(|| "the watch ended".into())),
            () = run.probe() => Err("the probe ended".into()),
            () = run.probe_pooler() => Err("the probe of PgBouncer ended".into()),
        };
        if evidence.is_err() {
            run.fleet.abandon().await;
        }
        run.driver.pool.close().await;
        evidence.map(|evidence| (run.summary(arguments, &evidence), check::check(&evidence)))
    };
    let ended = story.await;
    server.stop();
    if let Some(wal) = wal_folder(&folder).filter(|wal| wal.exists()) {
        let _ = std::process::Command::new("umount").arg(wal).status();
    }
    let (summary, verdicts) = ended.inspect_err(|_| println!("records are kept in {}", folder.display()))?;
    println!("{}", summary.text);
    let (lines, complete) = lacking::report(&summary.skipped, &summary.missing, length >= FULL_RUN, lacking::is_ci());
    let holds = report(&verdicts) && complete;
    for line in lines {
        println!("{line}");
    }
    if holds && !arguments.keep {
        std::fs::remove_dir_all(&folder)?;
    } else {
        println!("records, logs and server log are kept in {}", folder.display());
    }
    println!("repeat with: make torture TORTURE=\"{}\"\n", repeat(arguments, seed, length));
    Ok(holds)
}

/// For how many seconds the server did not answer.
fn away(evidence: &Evidence) -> f64 {
    let spans = check::merged(evidence.server_away.clone());
    spans.iter().map(|span| span.to - span.from).sum::<u64>() as f64 / SECOND as f64
}

/// What a run consisted of.
struct Summary {
    text: String,
    skipped: Vec<Skipped>,
    /// Faults that were to occur and did not.
    missing: Vec<String>,
}

fn repeat(arguments: &Arguments, seed: u64, length: Duration) -> String {
    let mut text = format!("--seed {seed} --seconds {} --workers {}", length.as_secs(), arguments.workers);
    if arguments.node {
        text.push_str(" --node");
    }
    let mut list = |option: &str, names: Vec<String>| {
        if !names.is_empty() {
            text.push_str(&format!(" {option} {}", names.join(",")));
        }
    };
    list("--faults", arguments.faults.iter().flatten().map(|kind| name(*kind)).collect());
    list("--without", arguments.without.iter().map(|part| name(*part)).collect());
    text
}

/// What runs during a run.
struct Run {
    server: Arc<Server>,
    fleet: Arc<Fleet>,
    driver: Arc<Driver>,
    faults: Arc<Faults>,
    skipped: Vec<Skipped>,
    random: std::sync::Mutex<fastrand::Rng>,
    cron_start: i64,
    cron_started: u64,
    /// Set while the fleet is measured: the probes would be counted, too.
    is_measured: AtomicBool,
}

impl Run {
    async fn start(arguments: &Arguments, seed: u64, folder: &Path, server: Arc<Server>) -> Result<Run, Failure> {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut skipped = Vec::new();
        let wal = if arguments.wants(Kind::WalFull) {
            small_wal_disk(folder, &server).await?.map_err(|lacking| skipped.push(lacking)).ok()
        } else {
            None
        };
        if let Err(error) = server.start_pooler() {
            skipped.push(Skipped::install("pooler", error.to_string()));
        }
        let link = Link::open(server.port(), random.fork()).await?;
        // The jobs of a batch have the same run_at, and Node's worker does not order those by id.
        let strict_batch = if arguments.node { 1 } else { 6 };
        let wants_scripts = arguments.wants(Kind::ScriptHost);
        let scripts = if wants_scripts { fleet::write_scripts(folder)? } else { None };
        if wants_scripts && scripts.is_none() {
            skipped.push(Skipped::install("script-host", "Node is not installed"));
        }
        let workers = arguments.workers.max(1);
        let clocks = fleet::build_clocks(folder, workers).unwrap_or_else(|error| {
            skipped.push(Skipped::install("shifted clocks", format!("they need a C compiler (`cc`): {error}")));
            HashMap::new()
        });
        let driver = Driver::new(&server.url(link.port()), strict_batch, scripts.is_some())?;
        driver.migrate().await?;
        let mut links = Vec::new();
        for slot in 0..workers {
            let pooler = server.pooler_port().filter(|_| Shape::of(slot).pooled);
            links.push(Link::open(pooler.unwrap_or_else(|| server.port()), random.fork()).await?);
        }
        let mut node_links = Vec::new();
        if arguments.node && fleet::node_modules().join("graphile-worker").exists() {
            for _ in 0..2 {
                node_links.push(Link::open(server.port(), random.fork()).await?);
            }
        } else if arguments.node {
            skipped.push(Skipped::install("Node's workers", "their package is not installed: run `make npm`"));
        }
        let (cron_start, cron_started) = (Utc::now().timestamp_millis(), now());
        let supplies = Supplies { scripts, clocks, cron: (cron_start, cron_started) };
        let fleet = Arc::new(Fleet::start(folder, &server, &driver, links, node_links, supplies).await?);
        let faults = Arc::new(Faults {
            server: server.clone(),
            fleet: fleet.clone(),
            driver: driver.clone(),
            wal,
            server_in_use: Arc::default(),
            counts: std::sync::Mutex::default(),
        });
        Ok(Run {
            server,
            fleet,
            driver,
            faults,
            skipped,
            random: std::sync::Mutex::new(random),
            cron_start,
            cron_started,
            is_measured: AtomicBool::new(false),
        })
    }

    async fn story(&self, arguments: &Arguments, length: Duration) -> Result<Evidence, Failure> {
        self.until("all workers have registered", Duration::from_secs(60), async || {
            let count: i64 = self.value("select count(*) from graphile_worker._rs_workers").await?;
            Ok(count >= self.fleet.ours() as i64)
        })
        .await?;
        let cron_first = cron_time(self.cron_start, self.cron_started) + TimeDelta::minutes(1);
        let with_limits = !arguments.without.contains(&Part::Limits);
        if with_limits {
            self.driver.set_limits().await;
        }

        let (mut load, fault_random) = {
            let mut random = lock(&self.random);
            (self.driver.start(&mut random, &arguments.without), random.fork())
        };
        let end = Instant::now() + length;
        self.faults.clone().run(self.kinds(arguments), fault_random, end, length >= FULL_RUN).await?;
        tokio::time::sleep_until(end).await;
        self.driver.stop();
        while let Some(ended) = load.join_next().await {
            ended?;
        }

        println!("faults are over, the fleet drains");
        let draining = now();
        let drained = self
            .until("the fleet has drained", DRAIN_TIMEOUT, async || {
                let left =
                    "select count(*) from graphile_worker._private_jobs where is_available or locked_by is not null";
                Ok(self.value::<i64>(left).await? == 0)
            })
            .await
            .is_ok()
            .then(|| now() - draining);
        let probe = match drained {
            Some(_) if with_limits => Some(self.driver.probe_limits().await?),
            _ => None,
        };
        let cron_last = cron_time(self.cron_start, self.cron_started) - TimeDelta::minutes(2);
        let idle = self.idle().await?;
        self.fleet.stop().await?;
        let cron = Cron { start: self.cron_start, started: self.cron_started, first: cron_first, last: cron_last };
        self.evidence(drained, probe, idle, cron).await
    }

    /// The faults to inflict: those that are wanted and not skipped.
    fn kinds(&self, arguments: &Arguments) -> Vec<Kind> {
        let mut kinds = arguments.faults.clone().unwrap_or_else(|| Kind::ALL.to_vec());
        kinds.retain(|kind| !self.skipped.iter().any(|skipped| skipped.what == name(*kind)));
        if arguments.without.contains(&Part::Limits) {
            kinds.retain(|kind| *kind != Kind::Limits);
        }
        if self.fleet.ours() <= 1 {
            // No worker is behind PgBouncer.
            kinds.retain(|kind| *kind != Kind::Pooler);
        }
        kinds
    }

    fn summary(&self, arguments: &Arguments, evidence: &Evidence) -> Summary {
        let counts = lock(&self.faults.counts).clone();
        let counts: Vec<String> = counts.iter().map(|(kind, count)| format!("{} {count}", name(*kind))).collect();
        let (shifted, not_shifted) = check::shifted_clocks(evidence);
        let mut skipped = self.skipped.clone();
        if !not_shifted.is_empty() {
            let why = format!("LD_PRELOAD had no effect on the processes {not_shifted:?}");
            skipped.push(Skipped::install("shifted clocks", why));
        }
        let text = format!(
            "faults: {}\nworker processes: {}, {shifted} of them with a shifted clock\nthe server was away for {:.1} s",
            counts.join(", "),
            evidence.processes.len(),
            away(evidence)
        );
        let missing = self.faults.missing(&self.kinds(arguments)).into_iter().map(name).collect();
        Summary { text, skipped, missing }
    }

    async fn value<T>(&self, sql: &'static str) -> sqlx::Result<T>
    where
        T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin,
    {
        sqlx::query_scalar(sql).fetch_one(&self.driver.pool).await
    }

    async fn until(
        &self,
        what: &str,
        limit: Duration,
        ask: impl AsyncFn() -> Result<bool, sqlx::Error>,
    ) -> Result<(), Failure> {
        let end = Instant::now() + limit;
        while Instant::now() < end {
            if ask().await.unwrap_or(false) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Err(format!("waited {} s in vain until {what}", limit.as_secs()).into())
    }

    /// Notes when the server does not answer, for whatever reason.
    async fn probe(&self) {
        let mut connection = None;
        let mut last = now();
        loop {
            if connection.is_none() {
                connection = self.driver.connect().await.ok();
            }
            if self.is_measured.load(Ordering::Relaxed) {
                last = now();
            } else if let Some(open) = &mut connection {
                match sqlx::query("select 1").execute(open).await {
                    Ok(_) => {
                        if now() - last > 700 * MILLISECOND {
                            self.server.was_away(last);
                        }
                        last = now();
                    }
                    Err(_) => connection = None,
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Notes when PgBouncer does not answer: it may need longer than the server to come back.
    async fn probe_pooler(&self) {
        let Some(port) = self.server.pooler_port() else { return std::future::pending().await };
        let mut connection = None;
        let mut last = now();
        loop {
            if connection.is_none() {
                let url = self.server.url(port.load(Ordering::Relaxed));
                let options = url.parse::<PgConnectOptions>().map(|options| options.extra_float_digits(None));
                let Ok(options) = options else { return };
                let connecting = PgConnection::connect_with(&options);
                connection = tokio::time::timeout(PROBE_TIMEOUT, connecting).await.ok().and_then(Result::ok);
            }
            if self.is_measured.load(Ordering::Relaxed) {
                last = now();
            } else if let Some(open) = &mut connection {
                let answer = tokio::time::timeout(PROBE_TIMEOUT, sqlx::raw_sql("select 1").execute(open)).await;
                if answer.is_ok_and(|answer| answer.is_ok()) {
                    if now() - last > 700 * MILLISECOND {
                        self.fleet.pooler_was_away(last);
                    }
                    last = now();
                } else {
                    connection = None;
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Measures what the fleet does when there is nothing to do.
    async fn idle(&self) -> Result<Idle, Failure> {
        let transactions =
            "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()";
        self.is_measured.store(true, Ordering::Relaxed);
        // Backends report their statistics once a second.
        tokio::time::sleep(Duration::from_millis(1200)).await;
        let (begin, before, cpu_before) = (now(), self.value::<i64>(transactions).await?, self.fleet.cpu().await);
        tokio::time::sleep(IDLE_TIME).await;
        let (end, after, cpu_after) = (now(), self.value::<i64>(transactions).await?, self.fleet.cpu().await);
        self.is_measured.store(false, Ordering::Relaxed);
        let cpu = cpu_after
            .into_iter()
            .filter_map(|(process, seconds)| {
                let (_, before) = cpu_before.iter().find(|(number, _)| *number == process)?;
                Some((process, seconds - before))
            })
            .collect();
        let seconds = (end - begin) as f64 / SECOND as f64;
        Ok(Idle { seconds, transactions: after - before, workers: self.fleet.len(), cpu })
    }

    async fn evidence(
        &self,
        drained: Option<u64>,
        probe: Option<Probe>,
        idle: Idle,
        cron: Cron,
    ) -> Result<Evidence, Failure> {
        let pool = &self.driver.pool;
        let rows: Vec<(i64, bool, String)> = sqlx::query_as(
            "select jobs.id, jobs.is_available or jobs.locked_by is not null, format(
               'row: %s %s, attempts %s/%s, run_at %s, locked_by %s, key %s, revision %s, last_error %s, payload %s',
               coalesce(tasks.identifier, '(no task)'), jobs.id, attempts, max_attempts, run_at, locked_by, key, revision,
               last_error, left(payload::text, 200))
             from graphile_worker._private_jobs as jobs
             left join graphile_worker._private_tasks as tasks on tasks.id = jobs.task_id
             order by jobs.id",
        )
        .fetch_all(pool)
        .await?;
        let locked = sqlx::query_scalar(
            "select format('job %s is locked by %s since %s', id, locked_by, locked_at)
             from graphile_worker._private_jobs where locked_by is not null or locked_at is not null
             union all
             select format('queue %s is locked by %s since %s', queue_name, locked_by, locked_at)
             from graphile_worker._private_job_queues where locked_by is not null or locked_at is not null",
        )
        .fetch_all(pool)
        .await?;
        let dangling = sqlx::query_scalar(
            "select format('job %s: task %s, queue %s', id, task_id, job_queue_id) from graphile_worker._private_jobs as jobs
             where not exists (select from graphile_worker._private_tasks as tasks where tasks.id = jobs.task_id)
                or job_queue_id is not null and not exists (
                  select from graphile_worker._private_job_queues as queues where queues.id = jobs.job_queue_id
                  union all
                  select from graphile_worker._rs_lanes as lanes where lanes.id = jobs.job_queue_id
                )",
        )
        .fetch_all(pool)
        .await?;
        let lanes = sqlx::query_scalar(
            "select format('queue %s has the limit %s, expected %s', queue_name, limit_id, graphile_worker._rs_limit_of_queue(queue_name))
             from graphile_worker._rs_lanes
             where queue_name is not null and limit_id is distinct from graphile_worker._rs_limit_of_queue(queue_name)",
        )
        .fetch_all(pool)
        .await?;
        let load = self.driver.take();
        for change in &load.changes.0 {
            self.fleet
                .note("limit", serde_json::json!({ "called": change.called.at, "change": format!("{change:?}") }));
        }
        Ok(Evidence {
            server_away: self.server.away(),
            load,
            ended: Ended {
                drained,
                left: rows.iter().filter(|(_, left, _)| *left).map(|(id, _, _)| *id).collect(),
                rows: rows.into_iter().map(|(id, _, text)| (id, text)).collect(),
                locked,
                dangling,
                lanes,
                probe,
            },
            idle,
            cron: Some(cron),
            ..self.fleet.evidence()
        })
    }
}

fn wal_folder(folder: &Path) -> Option<PathBuf> {
    std::env::var_os(OWN_MOUNTS).map(|_| folder.join("wal"))
}

/// Moves the WAL to a small disk of its own, if this process may mount one.
async fn small_wal_disk(folder: &Path, server: &Server) -> Result<Result<PathBuf, Skipped>, Failure> {
    let Some(wal) = wal_folder(folder) else {
        let why = own_mounts().err();
        return Ok(Err(why.unwrap_or_else(|| Skipped::install("wal-full", "it has no mount namespace of its own"))));
    };
    std::fs::create_dir_all(&wal)?;
    let mount = ["-t", "tmpfs", "-o", "size=112m", "torture-wal"];
    let mounted = std::process::Command::new("mount").args(mount).arg(&wal).status();
    if !mounted.is_ok_and(|status| status.success()) {
        return Ok(Err(Skipped::not_allowed("wal-full", "this machine allows no mount of a small disk (tmpfs)")));
    }
    server.kill();
    let (old, new) = (server.data().join("pg_wal"), wal.join("pg_wal"));
    let script = "cp -a \"$0\" \"$1\" && rm -r \"$0\" && ln -s \"$1\" \"$0\"";
    let moved = std::process::Command::new("sh").args(["-c", script]).arg(&old).arg(&new).status()?;
    if !moved.success() {
        return Err(format!("could not move {} to {}", old.display(), new.display()).into());
    }
    server.restart().await?;
    Ok(Ok(wal))
}

/// Prints a table of the verdicts, and the first violations of each. Returns whether there are none.
fn report(verdicts: &[Verdict]) -> bool {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    for verdict in verdicts {
        let result = match verdict.violations.len() {
            0 => "OK".to_owned(),
            count => format!("{count} VIOLATED"),
        };
        table.add_row(vec![verdict.name.to_owned(), result, verdict.checked.clone()]);
    }
    println!("{table}");
    let mut holds = true;
    for verdict in verdicts.iter().filter(|verdict| !verdict.violations.is_empty()) {
        holds = false;
        println!("\n{}: {} violations", verdict.name, verdict.violations.len());
        for violation in verdict.violations.iter().take(10) {
            println!("  {violation}");
        }
    }
    holds
}
