//! The faults: each is one kind of trouble that a fleet meets. To add one, add a `Kind`, say what it does in `does`, and
//! do it in `inflict`.

use crate::Failure;
use crate::fleet::{Fleet, NODE, Shape};
use crate::load::Driver;
use crate::proxy::Mode;
use crate::record::{lock, now};
use crate::server::{MAX_CONNECTIONS, Server};
use crate::worker::THRESHOLD;
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

/// As many faults at a time.
const AT_ONCE: usize = 3;

/// How long a full run continues until each kind has occurred.
const PATIENCE_FOR_ALL: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Kind {
    Kill,
    Term,
    Stop,
    ScriptHost,
    Backends,
    ServerKill,
    ServerCrash,
    Reset,
    Breaking,
    BlackHole,
    Late,
    RowLocks,
    TableLock,
    OpenTransaction,
    Connections,
    WalFull,
    Pooler,
    Limits,
}

impl Kind {
    pub(crate) const ALL: [Kind; 18] = [
        Kind::Kill,
        Kind::Term,
        Kind::Stop,
        Kind::ScriptHost,
        Kind::Backends,
        Kind::ServerKill,
        Kind::ServerCrash,
        Kind::Reset,
        Kind::Breaking,
        Kind::BlackHole,
        Kind::Late,
        Kind::RowLocks,
        Kind::TableLock,
        Kind::OpenTransaction,
        Kind::Connections,
        Kind::WalFull,
        Kind::Pooler,
        Kind::Limits,
    ];

    /// Whether it is about the server as a whole. Only one of these at a time.
    pub(crate) fn is_of_server(self) -> bool {
        matches!(self, Kind::ServerKill | Kind::ServerCrash | Kind::Connections | Kind::WalFull)
    }

    /// For `--list`.
    pub(crate) fn does(self) -> &'static str {
        match self {
            Kind::Kill => "kills a worker with SIGKILL and starts another",
            Kind::Term => "stops a worker with SIGTERM and starts another",
            Kind::Stop => "suspends a worker with SIGSTOP, briefly or beyond the recovery threshold, then SIGCONT",
            Kind::ScriptHost => "kills the Node process in which a worker runs its scripts (needs Node)",
            Kind::Backends => "terminates random backends of the workers (pg_terminate_backend)",
            Kind::ServerKill => "kills all processes of the server with SIGKILL and starts it again",
            Kind::ServerCrash => "kills one backend with SIGKILL: PostgreSQL ends all sessions and recovers",
            Kind::Reset => "closes all connections of a worker",
            Kind::Breaking => {
                "breaks connections of a worker at random: before the request, after it, or within the answer"
            }
            Kind::BlackHole => "passes nothing between a worker and the server, briefly or beyond the threshold",
            Kind::Late => "delays all answers to a worker by 30 to 250 ms",
            Kind::RowLocks => "holds row locks on jobs in an open transaction",
            Kind::TableLock => "holds a lock on the table of jobs",
            Kind::OpenTransaction => "holds a keyed add in an open transaction, then commits or rolls back",
            Kind::Connections => "uses up max_connections and closes connections of the workers meanwhile",
            Kind::WalFull => "fills the disk of the WAL (a small tmpfs; needs root and `unshare`)",
            Kind::Pooler => "stops PgBouncer, through which a worker connects, and starts it again (needs PgBouncer)",
            Kind::Limits => {
                "holds a change of a limit in an open transaction, then commits or rolls back; or pauses all workers"
            }
        }
    }
}

/// What faults act on.
pub(crate) struct Faults {
    pub(crate) server: Arc<Server>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) driver: Arc<Driver>,
    /// The small disk of the WAL, if there is one.
    pub(crate) wal: Option<PathBuf>,
    /// Faults of the server come one at a time.
    pub(crate) server_in_use: Arc<tokio::sync::Mutex<()>>,
    pub(crate) counts: Mutex<BTreeMap<Kind, usize>>,
}

impl Faults {
    /// Inflicts faults until `end`, each kind before any comes again. If `all` is set, continues for a while until each
    /// kind has occurred. Returns when all are over.
    pub(crate) async fn run(
        self: Arc<Self>,
        kinds: Vec<Kind>,
        mut random: fastrand::Rng,
        end: tokio::time::Instant,
        all: bool,
    ) -> Result<(), Failure> {
        let mut running = tokio::task::JoinSet::new();
        let mut bag = kinds.clone();
        random.shuffle(&mut bag);
        let mut closing = false;
        let last = if all { end + PATIENCE_FOR_ALL } else { end };
        while tokio::time::Instant::now() < last && !kinds.is_empty() {
            if tokio::time::Instant::now() > end && (!closing || bag.is_empty()) {
                closing = true;
                while let Some(ended) = running.join_next().await {
                    ended??;
                }
                bag = self.missing(&kinds);
                if bag.is_empty() {
                    break;
                }
            }
            if bag.is_empty() {
                bag = kinds.clone();
                // Twice as often as faults of the server, which leave little time for anything else.
                bag.extend(kinds.iter().filter(|kind| !kind.is_of_server()));
                random.shuffle(&mut bag);
            }
            tokio::time::sleep(Duration::from_millis(random.u64(100..1200))).await;
            while running.len() >= AT_ONCE {
                if let Some(ended) = running.join_next().await {
                    ended??;
                }
            }
            let Some(kind) = bag.pop() else { continue };
            let server = if kind.is_of_server() {
                match self.server_in_use.clone().try_lock_owned() {
                    Ok(in_use) => Some(in_use),
                    Err(_) => {
                        bag.insert(0, kind);
                        continue;
                    }
                }
            } else {
                None
            };
            let (faults, mut random) = (self.clone(), random.fork());
            running.spawn(async move {
                let _server_in_use = server;
                faults.fleet.note("fault", json!({ "kind": format!("{kind:?}") }));
                let done = faults.inflict_beside_node(kind, &mut random).await;
                faults.fleet.note(
                    "fault over",
                    json!({ "kind": format!("{kind:?}"), "error": done.as_ref().err().map(ToString::to_string) }),
                );
                match done {
                    Ok(occurred) => {
                        *lock(&faults.counts).entry(kind).or_default() += usize::from(occurred);
                        Ok(())
                    }
                    // Another fault was faster: the server, or the connection, was already away.
                    Err(error) if error.downcast_ref::<sqlx::Error>().is_some() => Ok(()),
                    Err(error) => Err(error),
                }
            });
        }
        while let Some(ended) = running.join_next().await {
            ended??;
        }
        Ok(())
    }

    /// Those of the kinds that have not occurred.
    pub(crate) fn missing(&self, kinds: &[Kind]) -> Vec<Kind> {
        let counts = lock(&self.counts);
        kinds.iter().copied().filter(|kind| counts.get(kind).is_none_or(|count| *count == 0)).collect()
    }

    async fn inflict_beside_node(&self, kind: Kind, random: &mut fastrand::Rng) -> Result<bool, Failure> {
        if !kind.is_of_server() {
            return self.inflict(kind, random).await;
        }
        let places = self.fleet.kill_node_workers().await?;
        let done = self.inflict(kind, random).await;
        self.fleet.start_node_workers(places)?;
        done
    }

    /// Returns whether there was anything to break.
    async fn inflict(&self, kind: Kind, random: &mut fastrand::Rng) -> Result<bool, Failure> {
        let fleet = &self.fleet;
        let slot = fleet.random_slot(random);
        match kind {
            Kind::Kill => fleet.kill(fleet.random_victim(random)).await?,
            Kind::Term => fleet.terminate(fleet.random_victim(random)).await?,
            Kind::Stop => fleet.suspend(slot, outage(random)).await,
            Kind::ScriptHost => return Ok(fleet.kill_script_host(random).await),
            Kind::Backends => self.terminate_backends(random).await?,
            Kind::ServerKill => self.kill_server(random).await?,
            Kind::ServerCrash => {
                let from = now();
                if !self.server.kill_one_backend(random) {
                    return Ok(false);
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
                self.until_server_answers(from).await?;
            }
            Kind::Reset => {
                for _ in 0..random.u8(1..4) {
                    fleet.reset(slot);
                    sleep(random, 0..300).await;
                }
            }
            Kind::Breaking => {
                let one_in = random.u32(4..30);
                fleet.disturb(slot, Mode::Breaking(one_in), milliseconds(random, 2000..6000), false).await;
            }
            Kind::BlackHole => {
                let reset = random.bool();
                fleet.disturb(slot, Mode::BlackHole, outage(random), reset).await;
            }
            Kind::Late => {
                // A new connection takes about ten answers, and that must be possible within the threshold. Behind a
                // pooler a heartbeat takes four, and the worker waits a second for it.
                let late = Mode::Late(milliseconds(random, if Shape::of(slot).pooled { 30..100 } else { 30..250 }));
                fleet.disturb(slot, late, milliseconds(random, 1000..6000), false).await;
            }
            Kind::RowLocks => self.lock_rows(random).await?,
            Kind::TableLock => self.lock_table(random).await?,
            Kind::OpenTransaction => {
                let length = milliseconds(random, 500..4000);
                self.driver.hold_keyed_add(random, length).await?;
            }
            Kind::Connections => self.use_up_connections(random).await?,
            Kind::WalFull => return self.fill_wal(random).await,
            Kind::Pooler => {
                let from = now();
                self.server.restart_pooler(outage(random)).await?;
                fleet.pooler_was_away(from);
            }
            Kind::Limits => {
                let length = milliseconds(random, 300..2000);
                self.driver.hold_limit(random, length).await?;
            }
        }
        Ok(true)
    }

    async fn terminate_backends(&self, random: &mut fastrand::Rng) -> Result<(), Failure> {
        let mut connection = self.driver.connect().await?;
        let backends: Vec<i32> = sqlx::query_scalar(
            "select pid from pg_stat_activity
             where backend_type = 'client backend' and pid <> pg_backend_pid() and not starts_with(application_name, $1)",
        )
        .bind(NODE)
        .fetch_all(&mut connection)
        .await?;
        for pid in backends {
            if random.u8(..3) == 0 {
                sqlx::query("select pg_terminate_backend($1)").bind(pid).execute(&mut connection).await?;
            }
        }
        Ok(())
    }

    async fn kill_server(&self, random: &mut fastrand::Rng) -> Result<(), Failure> {
        let from = now();
        self.server.kill();
        // Mostly back at once; sometimes away for longer than the recovery threshold.
        let away = if random.u8(..4) == 0 {
            THRESHOLD + milliseconds(random, 500..3000)
        } else {
            milliseconds(random, 0..500)
        };
        tokio::time::sleep(away).await;
        self.server.restart().await?;
        self.until_server_answers(from).await
    }

    async fn until_server_answers(&self, from: u64) -> Result<(), Failure> {
        let end = tokio::time::Instant::now() + Duration::from_secs(60);
        loop {
            match self.driver.connect().await {
                Ok(connection) => {
                    let _ = connection.close().await;
                    self.server.was_away(from);
                    return Ok(());
                }
                Err(error) if tokio::time::Instant::now() > end => return Err(error.into()),
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    }

    /// Not jobs of strict queues, under a limit or not: a claim skips rows that another transaction has locked.
    async fn lock_rows(&self, random: &mut fastrand::Rng) -> Result<(), Failure> {
        let mut connection = self.driver.connect().await?;
        let mut transaction = connection.begin().await?;
        sqlx::query(
            "select id from graphile_worker._private_jobs
             where coalesce(job_queue_id, 0) not in (
               select id from graphile_worker._private_job_queues where queue_name ~ 'strict-|row-'
               union all
               select id from graphile_worker._rs_lanes where queue_name like 'row-%'
             )
             order by md5(id::text || $1) limit 30 for update skip locked",
        )
        .bind(random.u32(..).to_string())
        .execute(&mut *transaction)
        .await?;
        sleep(random, 500..4000).await;
        transaction.rollback().await?;
        Ok(())
    }

    async fn lock_table(&self, random: &mut fastrand::Rng) -> Result<(), Failure> {
        let mode = random.choice(["share", "share row exclusive", "exclusive", "access exclusive"]).unwrap_or("share");
        let mut connection = self.driver.connect().await?;
        let mut transaction = connection.begin().await?;
        let sql = format!("lock table graphile_worker._private_jobs in {mode} mode");
        sqlx::query(AssertSqlSafe(sql)).execute(&mut *transaction).await?;
        sleep(random, 200..1800).await;
        transaction.rollback().await?;
        Ok(())
    }

    async fn use_up_connections(&self, random: &mut fastrand::Rng) -> Result<(), Failure> {
        let mut connecting = tokio::task::JoinSet::new();
        for _ in 0..MAX_CONNECTIONS {
            let driver = self.driver.clone();
            connecting.spawn(async move { driver.connect().await });
        }
        let mut held: Vec<PgConnection> = connecting.join_all().await.into_iter().flatten().collect();
        let from = now();
        let slot = self.fleet.random_slot(random);
        self.fleet.reset(slot);
        // The worker or the fault takes the place of each closed connection.
        let end = tokio::time::Instant::now() + milliseconds(random, 500..3000);
        while tokio::time::Instant::now() < end {
            match self.driver.connect().await {
                Ok(connection) => held.push(connection),
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
        for connection in held {
            let _ = connection.close().await;
        }
        // Workers that lost their connections could not get new ones.
        self.server.was_away(from);
        Ok(())
    }

    /// Fills the small disk with a file, writes WAL until PostgreSQL fails, and makes room again.
    async fn fill_wal(&self, random: &mut fastrand::Rng) -> Result<bool, Failure> {
        let Some(wal) = &self.wal else { return Ok(false) };
        let ballast = wal.join("ballast");
        let mut connection = self.driver.connect().await?;
        let filled = fill(&ballast);
        let from = now();
        let mut failed = false;
        for _ in 0..200 {
            let write = "select pg_logical_emit_message(false, 'torture', repeat('x', 1000000))";
            if sqlx::query(write).execute(&mut connection).await.is_err() {
                failed = true;
                break;
            }
        }
        self.fleet.note("wal full", json!({ "ballast": filled, "failed": failed }));
        sleep(random, 0..1500).await;
        std::fs::remove_file(&ballast)?;
        // PostgreSQL stops for good if it finds no room for its recovery either.
        self.server.restart().await?;
        self.until_server_answers(from).await?;
        Ok(failed)
    }
}

/// Writes zeros until the disk is full; returns how many bytes fitted.
fn fill(path: &std::path::Path) -> u64 {
    use std::io::Write;
    let Ok(mut file) = std::fs::File::create(path) else { return 0 };
    let block = vec![0; 256 * 1024];
    let mut bytes = 0;
    while let Ok(written @ 1..) = file.write(&block) {
        bytes += written as u64;
    }
    bytes
}

/// Well below the recovery threshold, or well beyond it.
fn outage(random: &mut fastrand::Rng) -> Duration {
    if random.bool() { milliseconds(random, 100..900) } else { THRESHOLD + milliseconds(random, 1500..4000) }
}

fn milliseconds(random: &mut fastrand::Rng, range: std::ops::Range<u64>) -> Duration {
    Duration::from_millis(random.u64(range))
}

async fn sleep(random: &mut fastrand::Rng, range: std::ops::Range<u64>) {
    tokio::time::sleep(milliseconds(random, range)).await;
}
