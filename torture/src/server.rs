//! The private PostgreSQL server of a run: started, killed and started again.

use crate::Failure;
use crate::record::{Span, lock, now};
use graphile_worker_devdb::{Cluster, ClusterOptions, PgBouncer};
use rustix::process::{Pid, Signal, kill_process};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// As few as the fleet needs, so that a fault can use them up.
pub(crate) const MAX_CONNECTIONS: u32 = 100;

pub(crate) struct Server {
    folder: PathBuf,
    cluster: Mutex<Option<Cluster>>,
    port: Arc<AtomicU16>,
    pooler: Mutex<Option<PgBouncer>>,
    pooler_port: Arc<AtomicU16>,
    away: Mutex<Vec<Span>>,
}

/// A client gets a server connection for one transaction. PgBouncer's default is to give up for 15 seconds after it could
/// not log in, which is longer than the recovery threshold.
const POOLER: [(&str, &str); 2] = [("pool_mode", "transaction"), ("server_login_retry", "1")];

impl Server {
    pub(crate) fn start(folder: &Path) -> Result<Server, Failure> {
        let server = Server {
            folder: folder.to_owned(),
            cluster: Mutex::default(),
            port: Arc::new(AtomicU16::new(0)),
            pooler: Mutex::default(),
            pooler_port: Arc::new(AtomicU16::new(0)),
            away: Mutex::default(),
        };
        server.open()?;
        Ok(server)
    }

    /// Starts the server if it does not run.
    fn open(&self) -> Result<(), Failure> {
        self.keep_log();
        let cluster = ClusterOptions::new(self.folder.join("db"))
            // A killed process loses nothing that it wrote, so fsync can be off. synchronous_commit must be on: PostgreSQL
            // buffers commits in its own memory without it.
            .setting("fsync", "off")
            .setting("full_page_writes", "off")
            .setting("max_connections", MAX_CONNECTIONS.to_string())
            .setting("deadlock_timeout", "200ms")
            .setting("log_lock_waits", "on")
            .setting("log_line_prefix", "%m [%p] ")
            .setting("min_wal_size", "32MB")
            .setting("max_wal_size", "64MB")
            .open()?;
        let port = port_of(&cluster.url("postgres"))?;
        let moved = self.port.swap(port, Ordering::Relaxed) != port;
        // The handle of the killed server registers this process until the new one is there.
        *lock(&self.cluster) = Some(cluster);
        if moved && lock(&self.pooler).take().is_some() {
            self.start_pooler()?;
        }
        Ok(())
    }

    /// Starts a PgBouncer in front of the server, in transaction mode.
    pub(crate) fn start_pooler(&self) -> Result<(), Failure> {
        let started = lock(&self.cluster).as_ref().map(|cluster| cluster.pgbouncer(&POOLER));
        let pooler = started.ok_or("the server does not run")??;
        self.pooler_port.store(port_of(&pooler.url("postgres"))?, Ordering::Relaxed);
        *lock(&self.pooler) = Some(pooler);
        Ok(())
    }

    /// Where PgBouncer listens, if it was started.
    pub(crate) fn pooler_port(&self) -> Option<Arc<AtomicU16>> {
        (self.pooler_port.load(Ordering::Relaxed) > 0).then(|| self.pooler_port.clone())
    }

    /// Stops PgBouncer and starts it again after a while.
    pub(crate) async fn restart_pooler(&self, away: Duration) -> Result<(), Failure> {
        tokio::task::block_in_place(|| lock(&self.pooler).as_mut().map(PgBouncer::stop));
        tokio::time::sleep(away).await;
        tokio::task::block_in_place(|| lock(&self.pooler).as_mut().map_or(Ok(()), PgBouncer::start))?;
        Ok(())
    }

    /// Where the server listens; changes if another program takes the port while the server is down.
    pub(crate) fn port(&self) -> Arc<AtomicU16> {
        self.port.clone()
    }

    /// The URL of the database by way of a proxy on this port.
    pub(crate) fn url(&self, port: u16) -> String {
        let direct = lock(&self.cluster).as_ref().map(|cluster| cluster.url("postgres")).unwrap_or_default();
        let (credentials, _) = direct.rsplit_once('@').unwrap_or_default();
        format!("{credentials}@127.0.0.1:{port}/postgres")
    }

    /// When the server was killed, or did not answer.
    pub(crate) fn away(&self) -> Vec<Span> {
        lock(&self.away).clone()
    }

    pub(crate) fn was_away(&self, from: u64) {
        lock(&self.away).push(Span { from, to: now() });
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.folder.join("db/server/data")
    }

    fn postmaster(&self) -> Option<i32> {
        std::fs::read_to_string(self.data().join("postmaster.pid")).ok()?.lines().next()?.trim().parse().ok()
    }

    /// Kills the server and all its processes with SIGKILL and waits until they are gone.
    pub(crate) fn kill(&self) {
        let killed = tokio::task::block_in_place(|| lock(&self.cluster).as_ref().map(Cluster::kill));
        if let Some(Err(error)) = killed {
            eprintln!("could not kill the server: {error}");
        }
    }

    /// Kills one process of the server with SIGKILL: PostgreSQL ends all the others and recovers by itself.
    /// Returns whether there was one.
    pub(crate) fn kill_one_backend(&self, random: &mut fastrand::Rng) -> bool {
        let children = self.postmaster().map(children_of).unwrap_or_default();
        let Some(child) = random.choice(children) else { return false };
        signal(child, Signal::KILL);
        true
    }

    /// Starts the server again if it is down. Tries for a while: the port or the disk may not be free yet.
    pub(crate) async fn restart(&self) -> Result<(), Failure> {
        let mut tries = 0;
        loop {
            let opened = tokio::task::block_in_place(|| self.open());
            match opened {
                Ok(()) => return Ok(()),
                Err(error) if tries == 20 => return Err(error),
                Err(_) => tries += 1,
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }

    pub(crate) fn stop(&self) {
        self.keep_log();
        *lock(&self.pooler) = None;
        if let Some(cluster) = lock(&self.cluster).take()
            && let Err(error) = cluster.stop()
        {
            eprintln!("could not stop the server: {error}");
        }
    }

    /// devdb begins a new log at each start; this one has them all.
    fn keep_log(&self) {
        let Ok(text) = std::fs::read(self.folder.join("db/server.log")) else { return };
        let all = std::fs::OpenOptions::new().create(true).append(true).open(self.folder.join("server.log"));
        if let Err(error) = all.and_then(|mut file| file.write_all(&text)) {
            eprintln!("could not keep the server's log: {error}");
        }
    }
}

fn port_of(url: &str) -> Result<u16, Failure> {
    let port = url.rsplit_once(':').and_then(|(_, rest)| rest.split('/').next()?.parse().ok());
    port.ok_or_else(|| "the server's URL has no port".into())
}

pub(crate) fn signal(process: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(process) {
        // It may have ended by itself.
        let _ = kill_process(pid, signal);
    }
}

/// The processes that any thread of this one has started.
pub(crate) fn children_of(parent: i32) -> Vec<i32> {
    let threads = std::fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
    let children = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    children.flat_map(|text| text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect()
}
