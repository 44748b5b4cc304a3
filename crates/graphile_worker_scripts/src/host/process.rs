//! One host: a child process, the socket to it, the jobs in it, and how it ends. `mod` decides which host gets a job;
//! `protocol` defines the frames.

use super::language::Language;
use super::protocol::{
    self, AddJob, AddJobs, FromHost, GetQueueName, Hello, Kind, Level, Lines, Method, PROTOCOL, Problem, ToHost,
};
use graphile_worker::{DatabaseConfig, RawJobSpec, WorkerContext, WorkerUtils};
use serde_json::value::RawValue;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::process::ExitStatus;
#[cfg(unix)]
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
#[cfg(not(unix))]
use tokio::net::TcpStream as Socket;
#[cfg(unix)]
use tokio::net::UnixStream as Socket;
#[cfg(not(unix))]
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
#[cfg(unix)]
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
#[cfg(unix)]
use tokio::process::Command;
use tokio::process::{Child, ChildStderr, ChildStdin};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::{Span, debug, error, info, warn};

/// How long a host may take to send `hello`, and to load a file.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a host may take to exit after its socket was closed, before it is killed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the last frames and output of a dead host may take to arrive.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// The interval of pings while a host has jobs.
const PING_INTERVAL: Duration = Duration::from_millis(100);

/// How long a host that was idle has jobs before its first ping.
const FIRST_PING_AFTER: Duration = Duration::from_millis(10);

/// How long a ping may stay unanswered before the host counts as blocked.
const BLOCKED_AFTER: Duration = Duration::from_millis(50);

/// A host that works for this share of its time or more counts as busy.
const BUSY_FROM: f64 = 0.9;

/// How long an aborted job may take to end, before the worker kills or retires its host.
const ABORT_GRACE: Duration = Duration::from_secs(2);

/// How long the other jobs of a host may take if one of its jobs ignores its abort.
const RETIRE_TIMEOUT: Duration = Duration::from_secs(60);

const MEMORY_INTERVAL: Duration = Duration::from_secs(1);
const IDLE_INTERVAL: Duration = Duration::from_secs(10);

/// The capacity that an emptied buffer keeps.
const LARGEST_BUFFER: usize = 1024 * 1024;

/// The maximum length of a line of output. A longer line is split.
const LONGEST_LINE: usize = 64 * 1024;

/// How many lines of output the error of a host that cannot start contains.
const LAST_LINES: usize = 8;

/// Moves the socket, which is passed as standard output, to descriptor 3, and restores standard input and output for the
/// tasks. A second shell waits until the worker closes standard input or dies. Then it kills the process group: the host,
/// even if it is blocked, and everything that its tasks have started.
#[cfg(unix)]
const LAUNCHER: &str = "exec 4<&0; \
    ( ( trap '' HUP INT TERM; read -r _ <&4; kill -KILL 0 ) </dev/null >/dev/null 2>&1 & ); \
    exec \"$@\" 3>&1 1>&2 0</dev/null 4<&-";

/// How to start a host.
pub(crate) struct Launch {
    pub(crate) language: Language,
    pub(crate) command: Vec<String>,
    /// The source of a built-in host, which it reads from the socket before the first frame.
    pub(crate) source: &'static str,
    pub(crate) tasks_dir: String,
    pub(crate) database: DatabaseConfig,
    pub(crate) schema: String,
    pub(crate) concurrency: usize,
    pub(crate) max_pool_size: u32,
    pub(crate) memory_limit: Option<u64>,
}

pub(crate) struct Process {
    launch: Arc<Launch>,
    pid: u32,
    state: Mutex<State>,
    to_write: Notify,
    /// Notified when an idle host gets a job, or when the host is retired.
    began: Notify,
    asked_to_end: CancellationToken,
    /// Cancelled when the host may not take any time to exit by itself.
    kill_requested: CancellationToken,
    ended: CancellationToken,
}

struct State {
    outgoing: Vec<u8>,
    jobs: HashMap<u64, SentJob>,
    loads: VecDeque<Load>,
    /// Since when the first of these files has been loading.
    loading_since: Instant,
    last_id: u64,
    greeting: Option<oneshot::Sender<Result<(), String>>>,
    /// The version of the database URL that the host has.
    url_version: u64,
    /// The unanswered ping, and when it was sent.
    ping: Option<(u64, Instant)>,
    busy: f64,
    /// Whether supervision pauses because the host has no jobs.
    is_parked: bool,
    /// Whether the frames to be written end an idle time: then they are written without waiting for more.
    is_urgent: bool,
    idle_since: Instant,
    /// Since when the host gets no more jobs.
    retired: Option<Instant>,
    /// Whether the host is ending or has ended, and only its last frames and output may still arrive.
    is_ending: bool,
    utils: Option<WorkerUtils>,
    last_lines: VecDeque<(Instant, String)>,
    /// The error of its `fatal` frame, and the run that caused it, if the host knows.
    fatal: Option<(String, Option<u64>)>,
    /// Why the host has ended.
    over: Option<Arc<str>>,
}

/// A job that was sent to the host and has not ended yet.
struct SentJob {
    /// Its name in logs and errors.
    name: JobName,
    answer: Option<oneshot::Sender<RunResult>>,
    span: Span,
    /// The ping that was unanswered when the job was sent. Until it is answered, the job has not started.
    behind: Option<u64>,
    /// When the worker stopped waiting for the job.
    abandoned: Option<Instant>,
}

struct Load {
    task: String,
    generation: u64,
    answer: oneshot::Sender<Result<(), LoadError>>,
}

/// How a run ended.
#[derive(Debug)]
pub(crate) enum RunResult {
    Done,
    Failed(Problem),
    /// The failed items of a batch, by their index.
    FailedItems(Vec<(usize, Problem)>),
    /// The host ended, and with it all jobs in it.
    WithHost(Crash),
}

/// A job's name in errors and logs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct JobName {
    id: i64,
    task: Arc<str>,
}

impl fmt::Display for JobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "job {} ({})", self.id, self.task)
    }
}

/// The end of a host, from the point of view of one of its jobs.
#[derive(Debug, Clone)]
pub(crate) struct Crash {
    /// What happened, as a sentence for the job's error.
    pub(crate) sentence: String,
    pub(crate) blame: Blame,
}

/// Which job ended the host.
#[derive(Debug, Clone)]
pub(crate) enum Blame {
    /// This job: it ran alone in the host, or the host named it.
    This,
    /// Another job.
    Other(String),
    /// One of the jobs that ran in it; it is not known which one.
    Unknown(Arc<Suspects>),
    /// None: the worker ended the host.
    NoJob,
}

/// The jobs that ran in a host when it ended. One of them is the culprit.
#[derive(Debug)]
pub(crate) struct Suspects {
    pub(crate) names: Vec<JobName>,
    pub(crate) at: Instant,
    /// Cancelled when the culprit is known.
    pub(crate) proven: CancellationToken,
}

/// How a host ended ("was killed"), and why, if that is known.
struct HowItEnded {
    how: String,
    reason: Option<String>,
}

impl HowItEnded {
    fn sentence(&self, circumstances: &str) -> String {
        let HowItEnded { how, reason } = self;
        match reason {
            Some(reason) => format!("{HOST_ENDED} {how} {circumstances}: {reason}"),
            None => format!("{HOST_ENDED} {how} {circumstances}"),
        }
    }
}

/// The beginning of the error of a job that has crashed its host. A worker that finds it in `last_error` runs the job
/// alone.
pub(super) const HOST_ENDED: &str = "the host process of this task";

/// Why a file was not loaded.
#[derive(Debug, Clone)]
pub(crate) enum LoadError {
    /// The host cannot load the file, and reported why.
    Refused(String),
    /// The file ended the host.
    EndedHost(String),
    /// The host ended, but not because of the file.
    HostGone(Arc<str>),
}

/// What supervision decided to do with a host.
enum Verdict {
    /// Kill it: why, and the culprits, if they are known.
    Kill(String, Vec<JobName>),
    /// Let it exit: it is retired, and has no jobs.
    End,
}

impl Process {
    /// Starts a host and waits until it is ready to load files.
    pub(crate) async fn start(launch: Arc<Launch>) -> Result<Arc<Process>, String> {
        let name = launch.language.name().to_owned();
        let (mut child, socket) =
            spawn(&launch.command).map_err(|error| format!("cannot start the host for {name}: {error}"))?;
        let lifeline = child.stdin.take().expect("stdin is a pipe");
        let output = child.stderr.take().expect("stderr is a pipe");
        let (greeting, greeted) = oneshot::channel();
        let process = Arc::new(Process {
            pid: child.id().unwrap_or_default(),
            state: Mutex::new(State::new(greeting)),
            to_write: Notify::new(),
            began: Notify::new(),
            asked_to_end: CancellationToken::new(),
            kill_requested: CancellationToken::new(),
            ended: CancellationToken::new(),
            launch,
        });
        process.greet();
        let logging = tokio::spawn(process.clone().log_output(output));
        tokio::spawn(process.clone().live(child, lifeline, socket, logging));
        let problem = match tokio::time::timeout(START_TIMEOUT, greeted).await {
            Ok(Ok(Ok(()))) => {
                debug!(label = "host", language = name, pid = process.pid, "host started");
                return Ok(process);
            }
            Ok(Ok(Err(problem))) => problem,
            Ok(Err(_)) => "it ended before it sent `hello`".to_owned(),
            Err(_) => format!("it did not send `hello` within {START_TIMEOUT:?}"),
        };
        process.end();
        Err(process.with_last_lines(format!("cannot use the host for {name}: {problem}")))
    }

    fn greet(&self) {
        let Launch { source, tasks_dir, database, schema, concurrency, max_pool_size, .. } = &*self.launch;
        self.state().url_version = database.url_version();
        self.state().outgoing.extend_from_slice(source.as_bytes());
        self.send_frame(&ToHost::Hello(Hello {
            protocol: PROTOCOL,
            worker_version: env!("CARGO_PKG_VERSION"),
            tasks_dir,
            database_url: &database.url(),
            schema,
            concurrency: *concurrency,
            max_pool_size: *max_pool_size,
            log_level: log_level(),
        }));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while the lock is held leaves the state consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send_frame(&self, frame: &ToHost<'_>) {
        protocol::append(&mut self.state().outgoing, frame);
        self.to_write.notify_one();
    }

    /// Loads a version of a task's file.
    pub(crate) async fn load(&self, task: &str, path: &str, generation: u64) -> Result<(), LoadError> {
        let (answer, answered) = oneshot::channel();
        {
            let mut state = self.state();
            if let Some(why) = &state.over {
                return Err(LoadError::HostGone(why.clone()));
            }
            if state.is_ending {
                return Err(LoadError::HostGone("the host ended".into()));
            }
            if state.loads.is_empty() {
                state.loading_since = Instant::now();
            }
            state.loads.push_back(Load { task: task.to_owned(), generation, answer });
            protocol::append(&mut state.outgoing, &ToHost::Load { task, path, generation });
        }
        self.to_write.notify_one();
        let mut answered = std::pin::pin!(answered);
        loop {
            match tokio::time::timeout(START_TIMEOUT, answered.as_mut()).await {
                Ok(Ok(loaded)) => return loaded,
                Ok(Err(_)) => return Err(LoadError::HostGone("the host ended".into())),
                // A file that waits for those before it has not had its time yet.
                Err(_) if self.state().is_loading_for_long(task) => {
                    self.retire();
                    return Err(LoadError::Refused(format!("it did not load within {START_TIMEOUT:?}")));
                }
                Err(_) => {}
            }
        }
    }

    /// Forgets a task.
    pub(crate) fn unload(&self, task: &str) {
        self.send_frame(&ToHost::Unload { task });
    }

    /// Sends a job to the host; `None` if the host takes no more jobs.
    pub(crate) fn begin(self: &Arc<Self>, task: &str, generation: u64, ctx: &WorkerContext) -> Option<Run> {
        let (answer, answered) = oneshot::channel();
        let id = {
            let mut state = self.state();
            if !state.takes_jobs() {
                return None;
            }
            state.last_id += 1;
            let id = state.last_id;
            if state.utils.is_none() {
                state.utils = Some(ctx.utils().clone());
            }
            let version = self.launch.database.url_version();
            if std::mem::replace(&mut state.url_version, version) != version {
                protocol::append(&mut state.outgoing, &ToHost::Database { url: &self.launch.database.url() });
            }
            protocol::append_run(&mut state.outgoing, id, task, generation, ctx.job(), ctx.worker_id());
            let behind = state.ping.map(|(ping, _)| ping);
            let name = JobName { id: ctx.job().id, task: ctx.job().task_identifier.clone() };
            let in_flight = SentJob { name, answer: Some(answer), span: Span::current(), behind, abandoned: None };
            state.jobs.insert(id, in_flight);
            if std::mem::take(&mut state.is_parked) {
                state.is_urgent = true;
                self.began.notify_one();
            }
            id
        };
        self.to_write.notify_one();
        Some(Run { process: self.clone(), id, answered, is_over: false, is_aborted: false })
    }

    /// The host's current load.
    pub(crate) fn load_now(&self) -> HostLoad {
        let state = self.state();
        HostLoad {
            takes_jobs: state.takes_jobs(),
            blocked_for: state.blocked_for(),
            is_busy: state.busy >= BUSY_FROM,
            jobs: state.jobs.len(),
        }
    }

    /// How long the host has been idle.
    pub(crate) fn idle_for(&self) -> Duration {
        let state = self.state();
        if state.jobs.is_empty() { state.idle_since.elapsed() } else { Duration::ZERO }
    }

    /// Sends the host no more jobs. It ends when its running jobs have ended.
    pub(crate) fn retire(&self) {
        let mut state = self.state();
        state.retired.get_or_insert_with(Instant::now);
        state.is_parked = false;
        drop(state);
        self.began.notify_one();
    }

    /// Closes the socket, so that the host exits now.
    pub(crate) fn end(&self) {
        self.state().is_ending = true;
        self.asked_to_end.cancel();
    }

    /// Kills the host, if it was asked to end and has not.
    pub(crate) fn kill_now(&self) {
        self.kill_requested.cancel();
    }

    /// Returns when the host has ended.
    pub(crate) async fn ended(&self) {
        self.ended.cancelled().await;
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.is_cancelled()
    }

    fn with_last_lines(&self, sentence: String) -> String {
        let state = self.state();
        if state.last_lines.is_empty() {
            return sentence;
        }
        let lines: Vec<&str> = state.last_lines.iter().map(|(_, line)| line.as_str()).collect();
        format!("{sentence}; it printed:\n{}", lines.join("\n"))
    }

    /// Runs until the process has ended and its last frames and output have been read.
    async fn live(self: Arc<Self>, mut child: Child, lifeline: ChildStdin, socket: Socket, logging: JoinHandle<()>) {
        let (from_host, to_host) = socket.into_split();
        let writing = tokio::spawn(self.clone().write_frames(to_host));
        let mut reading = std::pin::pin!(self.read_frames(from_host));
        let mut exited = None;
        let mut announced = None;
        let verdict = tokio::select! {
            problem = &mut reading => {
                announced = Some(());
                problem.map(|problem| Verdict::Kill(problem, Vec::new()))
            }
            status = child.wait() => {
                exited = Some(status);
                None
            }
            verdict = self.supervise() => Some(verdict),
            () = self.asked_to_end.cancelled() => Some(Verdict::End),
        };
        self.state().is_ending = true;
        // This closes the socket for writing: the host reads the end of the stream and exits.
        writing.abort();
        let _ = writing.await;
        let mut killed = None;
        match verdict {
            Some(Verdict::Kill(why, to_blame)) => {
                killed = Some((why, to_blame));
                let _ = child.start_kill();
            }
            Some(Verdict::End) | None => {
                let limit = if exited.is_some() { OUTPUT_DRAIN_TIMEOUT } else { EXIT_TIMEOUT };
                let goodbye = async {
                    if announced.is_none() {
                        let _ = (&mut reading).await;
                        announced = Some(());
                    }
                    if exited.is_none() {
                        exited = Some(child.wait().await);
                    }
                };
                tokio::select! {
                    () = goodbye => {}
                    () = tokio::time::sleep(limit) => {}
                    () = self.kill_requested.cancelled() => {}
                }
                if exited.is_none() {
                    let _ = child.start_kill();
                }
            }
        }
        drop(lifeline);
        if announced.is_none() {
            let _ = tokio::time::timeout(OUTPUT_DRAIN_TIMEOUT, reading).await;
        }
        let status = match exited {
            Some(status) => status,
            None => child.wait().await,
        };
        let _ = tokio::time::timeout(OUTPUT_DRAIN_TIMEOUT, logging).await;
        self.is_over(killed, status.ok());
    }

    /// Answers all callers that wait for this host: its jobs, its loading files and its start.
    fn is_over(&self, killed: Option<(String, Vec<JobName>)>, status: Option<ExitStatus>) {
        let mut state = self.state();
        let was_aborted = self.asked_to_end.is_cancelled();
        let is_expected = was_aborted || state.retired.is_some();
        let was_killed = killed.is_some();
        let fatal = state.fatal.take();
        let (mut reason, mut to_blame) = killed.map_or((None, Vec::new()), |(why, to_blame)| (Some(why), to_blame));
        if let Some((error, run)) = fatal {
            to_blame.extend(run.and_then(|run| state.jobs.get(&run)).map(|job| job.name.clone()));
            reason.get_or_insert(error);
        }
        let how = match was_killed {
            true => "was killed".to_owned(),
            false => status.map_or("ended".to_owned(), how_it_ended),
        };
        let last_lines = if reason.is_none() && !is_expected { state.lines_of_the_end() } else { Vec::new() };
        if !last_lines.is_empty() {
            reason = Some(format!("it printed:\n{}", last_lines.join("\n")));
        }
        let ended = HowItEnded { how, reason };
        let while_it_ran: Arc<str> = ended.sentence("while the job ran").into();
        state.over = Some(while_it_ran.clone());
        // A job that has not started cannot be the culprit.
        let unanswered = state.ping.map(|(ping, _)| ping);
        let has_begun = |job: &SentJob| job.behind.is_none() || job.behind != unanswered;
        let jobs = std::mem::take(&mut state.jobs);
        let loads = std::mem::take(&mut state.loads);
        // If the host never became ready, the caller of `start` reports it.
        let had_begun = state.greeting.take().is_none();
        drop(state);
        let mut begun: Vec<JobName> = jobs.values().filter(|job| has_begun(job)).map(|job| job.name.clone()).collect();
        begun.sort_by_key(|job| job.id);
        let names = |jobs: &[JobName]| jobs.iter().map(JobName::to_string).collect::<Vec<_>>().join(", ");
        let (language, pid, how) = (self.launch.language.name(), self.pid, &ended.how);
        if had_begun && (was_killed || !is_expected || !jobs.is_empty()) {
            let (reason, jobs) = (&*while_it_ran, names(&begun));
            warn!(label = "host", language, pid, how, jobs, reason, "host ended");
        } else {
            debug!(label = "host", language, pid, how, "host ended");
        }
        for (place, load) in loads.into_iter().enumerate() {
            // Files are loaded one after the other, so the first one is the culprit, unless a job may be.
            let error = if place == 0 && !is_expected && jobs.is_empty() {
                let reason = ended.reason.as_ref().map_or(String::new(), |reason| format!(": {reason}"));
                LoadError::EndedHost(format!("the host process {how} while it loaded the file{reason}"))
            } else {
                LoadError::HostGone(while_it_ran.clone())
            };
            let _ = load.answer.send(Err(error));
        }
        let culprits = names(&to_blame);
        let suspects = Arc::new(Suspects { names: begun, at: Instant::now(), proven: CancellationToken::new() });
        for job in jobs.into_values() {
            let (circumstances, blame) = if was_aborted {
                ("while the job ran", Blame::NoJob)
            } else if to_blame.contains(&job.name) {
                ("because of this job", Blame::This)
            } else if !to_blame.is_empty() {
                ("while the job ran", Blame::Other(culprits.clone()))
            } else if !has_begun(&job) {
                ("while the job ran", Blame::Other(names(&suspects.names)))
            } else if suspects.names.len() == 1 {
                ("while this job ran alone in it", Blame::This)
            } else {
                ("while the job ran", Blame::Unknown(suspects.clone()))
            };
            if let Some(answer) = job.answer {
                let _ = answer.send(RunResult::WithHost(Crash { sentence: ended.sentence(circumstances), blame }));
            }
        }
        self.ended.cancel();
    }

    /// Writes frames to the host, all that have gathered in one call.
    async fn write_frames(self: Arc<Self>, mut to_host: OwnedWriteHalf) {
        let mut writing = Vec::new();
        loop {
            self.to_write.notified().await;
            if !std::mem::take(&mut self.state().is_urgent) {
                // Lets other tasks append their frames first.
                tokio::task::yield_now().await;
            }
            std::mem::swap(&mut writing, &mut self.state().outgoing);
            // `read_frames` notices that the host is gone.
            if !writing.is_empty() && to_host.write_all(&writing).await.is_err() {
                return;
            }
            writing.clear();
            writing.shrink_to(LARGEST_BUFFER);
        }
    }

    /// Reads until the host closes the socket. Returns a problem if the host violates the protocol.
    async fn read_frames(self: &Arc<Self>, mut from_host: OwnedReadHalf) -> Option<String> {
        let mut lines = Lines::default();
        loop {
            lines.buffer().reserve(64 * 1024);
            match from_host.read_buf(lines.buffer()).await {
                Ok(0) | Err(_) => return None,
                Ok(_) => {}
            }
            if let Err(problem) = lines.each(|line| self.handle_frame(line)) {
                return Some(problem);
            }
            if lines.buffer().is_empty() {
                lines.buffer().shrink_to(LARGEST_BUFFER);
            }
        }
    }

    fn handle_frame(self: &Arc<Self>, line: &[u8]) -> Result<(), String> {
        if line.is_empty() {
            return Ok(());
        }
        let replace_lone_surrogates;
        let frame: FromHost<'_> = match serde_json::from_slice(line) {
            Ok(frame) => frame,
            Err(error) => {
                replace_lone_surrogates = protocol::replace_lone_surrogates(line);
                serde_json::from_slice(&replace_lone_surrogates).map_err(|_| {
                    let begin = String::from_utf8_lossy(&line[..line.len().min(100)]);
                    format!("it sent {begin:?}, expected a frame of the protocol ({error})")
                })?
            }
        };
        match frame.r#type {
            Kind::Done => self.jobs_done(frame.id, &frame.ids),
            Kind::Failed => {
                let ended = match (frame.items, frame.error) {
                    (Some(items), _) => RunResult::FailedItems(items),
                    (None, Some(problem)) => RunResult::Failed(problem),
                    (None, None) => RunResult::Failed(Problem::new("the task failed; its host gave no reason")),
                };
                self.job_ended(frame.id, ended);
            }
            Kind::Log => self.log(&frame),
            Kind::Call => self.answer_call(&frame),
            Kind::Pong => {
                let mut state = self.state();
                if state.ping.is_some_and(|(ping, _)| ping == frame.id) {
                    state.ping = None;
                    state.busy = frame.busy.unwrap_or(0.0);
                }
            }
            Kind::Loaded => self.load_ended(&frame, Ok(())),
            Kind::NotLoaded => {
                let problem = frame.error.clone().unwrap_or_else(|| Problem::new("the host gave no reason"));
                self.load_ended(&frame, Err(LoadError::Refused(problem.text())));
            }
            Kind::Hello => {
                let greeted = match frame.protocol {
                    Some(PROTOCOL) => Ok(()),
                    other => Err(format!("it uses version {other:?} of the protocol, expected {PROTOCOL}")),
                };
                debug!(
                    label = "host",
                    language = frame.language,
                    version = frame.version,
                    pid = self.pid,
                    "host is ready"
                );
                if let Some(greeting) = self.state().greeting.take() {
                    let _ = greeting.send(greeted);
                }
            }
            Kind::Fatal => self.fatal(&frame),
            Kind::Unknown => {}
        }
        Ok(())
    }

    /// The host is about to exit. Its error is logged at level error, whatever the language itself prints.
    fn fatal(&self, frame: &FromHost<'_>) {
        let text = frame.error.clone().map_or("the host gave no reason".to_owned(), Problem::text);
        let (language, pid) = (self.launch.language.name(), self.pid);
        let mut state = self.state();
        let span = frame.run.and_then(|run| Some(state.jobs.get(&run)?.span.clone()));
        state.fatal = Some((text.clone(), frame.run));
        drop(state);
        let _entered = span.as_ref().map(Span::enter);
        error!(label = "host", language, pid, "{text}");
    }

    fn jobs_done(&self, id: u64, ids: &[u64]) {
        let mut state = self.state();
        let one = (id != 0).then_some(&id);
        for id in one.into_iter().chain(ids) {
            if let Some(SentJob { answer: Some(answer), .. }) = state.jobs.remove(id) {
                let _ = answer.send(RunResult::Done);
            }
        }
        state.note_idle();
    }

    fn job_ended(&self, id: u64, ended: RunResult) {
        let mut state = self.state();
        let job = state.jobs.remove(&id);
        state.note_idle();
        drop(state);
        if let Some(SentJob { answer: Some(answer), .. }) = job {
            let _ = answer.send(ended);
        }
    }

    fn load_ended(&self, frame: &FromHost<'_>, result: Result<(), LoadError>) {
        let mut state = self.state();
        let is_meant =
            |load: &Load| Some(&load.task) == frame.task.as_ref() && Some(load.generation) == frame.generation;
        if let Some(place) = state.loads.iter().position(is_meant)
            && let Some(load) = state.loads.remove(place)
        {
            state.loading_since = Instant::now();
            drop(state);
            let _ = load.answer.send(result);
        }
    }

    /// Logs a message of a task, in the span of its job.
    fn log(&self, frame: &FromHost<'_>) {
        let message = frame.message.as_deref().unwrap_or_default();
        let meta = frame.meta.map(RawValue::get);
        let scope = frame.scope.map(RawValue::get);
        let span = frame.run.and_then(|run| Some(self.state().jobs.get(&run)?.span.clone()));
        let label = if span.is_some() { "job" } else { "host" };
        let _entered = span.as_ref().map(Span::enter);
        match frame.level.unwrap_or(Level::Info) {
            Level::Error => error!(label, meta, scope, "{message}"),
            Level::Warning => warn!(label, meta, scope, "{message}"),
            Level::Info => info!(label, meta, scope, "{message}"),
            Level::Debug => debug!(label, meta, scope, "{message}"),
        }
    }

    /// Executes a call in a task of its own, and sends the result when it is known.
    fn answer_call(self: &Arc<Self>, frame: &FromHost<'_>) {
        let (id, method) = (frame.id, frame.method.unwrap_or(Method::Unknown));
        let params = frame.params.map(ToOwned::to_owned).unwrap_or_default();
        let Some(utils) = self.state().utils.clone() else { return };
        let process = self.clone();
        tokio::spawn(async move {
            match call(&utils, method, &params).await {
                Ok(value) => process.send_frame(&ToHost::Result { id, value: &value }),
                Err(error) => process.send_frame(&ToHost::CallError { id, error }),
            }
        });
    }

    /// Sends pings and checks the memory, until the host has to be ended.
    async fn supervise(&self) -> Verdict {
        let mut memory_at = Instant::now();
        loop {
            let is_idle = {
                let mut state = self.state();
                state.is_parked = state.jobs.is_empty() && state.retired.is_none();
                state.is_parked
            };
            if is_idle {
                let _ = tokio::time::timeout(IDLE_INTERVAL, self.began.notified()).await;
                tokio::time::sleep(FIRST_PING_AFTER).await;
            } else {
                tokio::time::sleep(PING_INTERVAL).await;
            }
            if memory_at <= Instant::now() {
                memory_at = Instant::now() + MEMORY_INTERVAL;
                if let Some(sentence) = self.memory_problem().await {
                    return Verdict::Kill(sentence, Vec::new());
                }
            }
            let mut state = self.state();
            if let Some(verdict) = state.judge() {
                return verdict;
            }
            if !state.jobs.is_empty() && state.ping.is_none() {
                state.last_id += 1;
                let id = state.last_id;
                state.ping = Some((id, Instant::now()));
                protocol::append(&mut state.outgoing, &ToHost::Ping { id });
                drop(state);
                self.to_write.notify_one();
            }
        }
    }

    async fn memory_problem(&self) -> Option<String> {
        let limit = self.launch.memory_limit?;
        let used = resident_bytes(self.pid).await?;
        (used > limit).then(|| {
            let mib = |bytes: u64| bytes / (1024 * 1024);
            let (used, limit) = (mib(used), mib(limit));
            format!("it used {used} MiB of memory; the limit is {limit} MiB")
        })
    }

    /// Logs, line by line, what the process and its tasks print directly.
    async fn log_output(self: Arc<Self>, mut output: ChildStderr) {
        let mut lines = Lines::default();
        let (language, pid) = (self.launch.language.name(), self.pid);
        let send_frame = |line: &[u8]| {
            let line = String::from_utf8_lossy(line).trim_end().to_owned();
            if line.is_empty() {
                return;
            }
            info!(label = "host", language, pid, "{line}");
            let mut state = self.state();
            if state.last_lines.len() == LAST_LINES {
                state.last_lines.pop_front();
            }
            state.last_lines.push_back((Instant::now(), line));
        };
        loop {
            lines.buffer().reserve(4096);
            let more = output.read_buf(lines.buffer()).await;
            let _ = lines.each(|line| {
                send_frame(line);
                Ok::<(), ()>(())
            });
            let is_over = !matches!(more, Ok(1..));
            if is_over || lines.buffer().len() > LONGEST_LINE {
                send_frame(&std::mem::take(&mut lines).into_rest());
            }
            if is_over {
                return;
            }
        }
    }
}

/// The load of a host.
pub(crate) struct HostLoad {
    pub(crate) takes_jobs: bool,
    /// For how long it has been blocked; zero if it is not.
    pub(crate) blocked_for: Duration,
    /// Whether it has little time left for more jobs.
    pub(crate) is_busy: bool,
    pub(crate) jobs: usize,
}

impl HostLoad {
    pub(crate) fn is_blocked(&self) -> bool {
        !self.blocked_for.is_zero()
    }
}

impl State {
    fn new(greeting: oneshot::Sender<Result<(), String>>) -> State {
        State {
            outgoing: Vec::new(),
            jobs: HashMap::new(),
            loads: VecDeque::new(),
            loading_since: Instant::now(),
            last_id: 0,
            greeting: Some(greeting),
            url_version: 0,
            ping: None,
            busy: 0.0,
            is_parked: false,
            is_urgent: false,
            idle_since: Instant::now(),
            retired: None,
            is_ending: false,
            utils: None,
            last_lines: VecDeque::new(),
            fatal: None,
            over: None,
        }
    }

    fn takes_jobs(&self) -> bool {
        self.over.is_none() && self.retired.is_none() && !self.is_ending
    }

    fn blocked_for(&self) -> Duration {
        let unanswered = self.ping.map_or(Duration::ZERO, |(_, sent)| sent.elapsed());
        unanswered.saturating_sub(BLOCKED_AFTER)
    }

    /// What the host printed just before it ended: most runtimes print there what went wrong.
    fn lines_of_the_end(&self) -> Vec<&str> {
        let fresh = |(at, _): &&(Instant, String)| at.elapsed() <= OUTPUT_DRAIN_TIMEOUT;
        self.last_lines.iter().filter(fresh).map(|(_, line)| line.as_str()).collect()
    }

    fn is_loading_for_long(&self, task: &str) -> bool {
        let is_first = self.loads.front().is_some_and(|load| load.task == task);
        is_first && self.loading_since.elapsed() >= START_TIMEOUT
    }

    fn note_idle(&mut self) {
        if self.jobs.is_empty() {
            self.idle_since = Instant::now();
        }
    }

    /// What to do with a host that is retired, or that has a job which ignores its abort.
    fn judge(&mut self) -> Option<Verdict> {
        let unanswered = self.ping.map(|(ping, sent)| (ping, sent.elapsed()));
        let does_not_stop = |job: &SentJob| {
            let has_begun = job.behind.is_none() || job.behind != unanswered.map(|(ping, _)| ping);
            has_begun && job.abandoned.is_some_and(|since| since.elapsed() >= ABORT_GRACE)
        };
        if self.jobs.values().any(does_not_stop) {
            if unanswered.is_some_and(|(_, waited)| waited >= ABORT_GRACE) {
                // The job that timed out may only have waited for the one that blocks the host.
                let reason = "it stopped answering after one of its jobs had timed out";
                return Some(Verdict::Kill(reason.to_owned(), Vec::new()));
            }
            // The host answers, so its other jobs continue. It is killed once they have ended or take too long.
            self.retired.get_or_insert_with(Instant::now);
        }
        let retired = self.retired?;
        if self.jobs.is_empty() {
            return Some(Verdict::End);
        }
        // Jobs that were not aborted may take any time: the host may be retired only because it missed a new file.
        let abandoned = self.jobs.values().filter(|job| job.abandoned.is_some()).map(|job| job.name.clone());
        let abandoned: Vec<JobName> = abandoned.collect();
        let is_late = retired.elapsed() >= RETIRE_TIMEOUT;
        if abandoned.len() == self.jobs.len() || (!abandoned.is_empty() && is_late) {
            let reason = "one of its jobs ignored its abort";
            return Some(Verdict::Kill(reason.to_owned(), abandoned));
        }
        None
    }
}

/// A job in a host. Dropping this before the job has ended aborts the job.
pub(crate) struct Run {
    process: Arc<Process>,
    id: u64,
    answered: oneshot::Receiver<RunResult>,
    is_over: bool,
    is_aborted: bool,
}

impl Run {
    /// Waits for the end. Aborts the job when `must_stop` returns.
    pub(crate) async fn ended(mut self, must_stop: impl Future<Output = ()>) -> RunResult {
        let answer = tokio::select! {
            biased;
            answer = &mut self.answered => Some(answer),
            () = must_stop => None,
        };
        let answer = match answer {
            Some(answer) => answer,
            None => {
                self.abort();
                (&mut self.answered).await
            }
        };
        self.is_over = true;
        answer.unwrap_or_else(|_| {
            let sentence = format!("{HOST_ENDED} ended while the job ran");
            RunResult::WithHost(Crash { sentence, blame: Blame::NoJob })
        })
    }

    fn abort(&mut self) {
        if !std::mem::replace(&mut self.is_aborted, true) {
            let reason = "the job must stop: it was cancelled, its timeout has passed, or the worker is shutting down";
            self.process.send_frame(&ToHost::Abort { id: self.id, reason });
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let is_abandoned = match self.process.state().jobs.get_mut(&self.id) {
            Some(job) => {
                job.abandoned = Some(Instant::now());
                true
            }
            None => false,
        };
        if is_abandoned {
            self.abort();
        }
    }
}

/// Executes a call of a task.
async fn call(utils: &WorkerUtils, method: Method, params: &RawValue) -> Result<Box<RawValue>, Problem> {
    let refused = |error: graphile_worker::Error| Problem::of(&error);
    let unfit = |error: serde_json::Error| Problem::of_parameters(&error);
    let value = match method {
        Method::AddJob => {
            let mut job: AddJob = protocol::parameters(params).map_err(unfit)?;
            let (payload, spec) = (job.take_payload(), std::mem::take(&mut job.spec));
            protocol::job_value(&utils.add_raw_job(&job.identifier, payload, spec).await.map_err(refused)?)
        }
        Method::AddJobs => {
            let AddJobs { jobs } = protocol::parameters(params).map_err(unfit)?;
            let jobs = jobs.into_iter().map(|mut job| {
                let (payload, spec) = (job.take_payload(), std::mem::take(&mut job.spec));
                RawJobSpec { identifier: job.identifier, payload, spec }
            });
            let jobs: Vec<_> = jobs.collect();
            protocol::jobs_value(&utils.add_raw_jobs(&jobs).await.map_err(refused)?)
        }
        Method::GetQueueName => {
            let GetQueueName { id } = protocol::parameters(params).map_err(unfit)?;
            let name = utils.queue_name(id).await.map_err(refused)?;
            let name = name.ok_or_else(|| Problem::new(format!("no queue has the id {id}")))?;
            serde_json::value::to_raw_value(&name)
        }
        Method::Unknown => return Err(Problem::new("this worker does not support the method")),
    };
    value.map_err(|error| Problem::new(error.to_string()))
}

/// The least important level that is logged.
fn log_level() -> Level {
    use tracing::level_filters::LevelFilter;
    match LevelFilter::current() {
        LevelFilter::OFF | LevelFilter::ERROR => Level::Error,
        LevelFilter::WARN => Level::Warning,
        LevelFilter::INFO => Level::Info,
        _ => Level::Debug,
    }
}

#[cfg(unix)]
fn spawn(command: &[String]) -> std::io::Result<(Child, Socket)> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let child = Command::new("/bin/sh")
        .args(["-c", LAUNCHER, "graphile-worker-host"])
        .args(command)
        .env("GRAPHILE_WORKER_HOST_FD", "3")
        .stdin(Stdio::piped())
        .stdout(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
        .stderr(Stdio::piped())
        // In its own group, so that Ctrl-C in a terminal reaches only the worker, which lets jobs finish.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()?;
    Ok((child, Socket::from_std(ours)?))
}

#[cfg(not(unix))]
fn spawn(_command: &[String]) -> std::io::Result<(Child, Socket)> {
    Err(std::io::Error::other("hosts need Unix sockets and process groups"))
}

#[cfg(not(unix))]
fn how_it_ended(status: ExitStatus) -> String {
    status.code().map_or("ended".to_owned(), |code| format!("ended with exit code {code}"))
}

#[cfg(unix)]
fn how_it_ended(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was killed by signal {signal}"),
        (None, Some(code)) => format!("ended with exit code {code}"),
        (None, None) => "ended".to_owned(),
    }
}

/// The resident memory of a process, if the system has `/proc`.
async fn resident_bytes(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(retired_for: Duration, abandoned: &[bool]) -> State {
        let (greeting, _) = oneshot::channel();
        let now = Instant::now();
        let job = |abandoned: &bool| SentJob {
            name: JobName { id: 1, task: "a".into() },
            answer: None,
            span: Span::none(),
            behind: None,
            abandoned: abandoned.then_some(now),
        };
        State {
            retired: now.checked_sub(retired_for),
            jobs: (1..).zip(abandoned.iter().map(job)).collect(),
            ..State::new(greeting)
        }
    }

    #[test]
    fn a_retired_host_is_killed_over_jobs_that_do_not_stop_and_no_others() {
        let (soon, late) = (Duration::ZERO, RETIRE_TIMEOUT);
        assert!(matches!(state(soon, &[]).judge(), Some(Verdict::End)));
        assert!(matches!(state(soon, &[true]).judge(), Some(Verdict::Kill(..))));
        assert!(state(soon, &[true, false]).judge().is_none());
        assert!(matches!(state(late, &[true, false]).judge(), Some(Verdict::Kill(..))));
        assert!(state(late, &[false]).judge().is_none());
    }
}
