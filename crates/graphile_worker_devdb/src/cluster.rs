//! A cluster in a folder: created once, started when it is needed, shared by all processes that open it, and
//! stopped when the last one has ended. The folder contains:
//!
//! ```text
//! lock          locked (flock) while a process checks whether the server runs, and starts it
//! users/        a file for each open handle, named after its process
//! watchdog      locked (flock) by the watchdog as long as it runs
//! password      of the superuser, for connections over TCP
//! port          of the last run; reused if it is free
//! server.log
//! server/       owned by the user that runs the server: data/, and the socket if the path is short
//! ```
//!
//! No process has to stop the server: a shell script (watchdog.sh) does, once no process in `users/` is
//! alive. So a killed owner leaves nothing running, and consecutive test processes reuse the running server.

use crate::Error;
use crate::error::Context;
use crate::programs::{Programs, ServerUser, current_user_id};
use sqlx::postgres::PgConnectOptions;
use std::fs::{self, File, Permissions};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const START_TIMEOUT: Duration = Duration::from_secs(180);

/// Options of a cluster; see [`Cluster::open`] for the defaults.
#[derive(Debug, Clone)]
#[must_use = "options do nothing until `open`"]
pub struct ClusterOptions {
    folder: PathBuf,
    programs: Option<PathBuf>,
    durable: bool,
    fresh: bool,
    linger: Duration,
    settings: Vec<(String, String)>,
}

impl ClusterOptions {
    /// Creates the options of a cluster in `folder`, with PostgreSQL's defaults.
    pub fn new(folder: impl Into<PathBuf>) -> ClusterOptions {
        ClusterOptions {
            folder: folder.into(),
            programs: None,
            durable: true,
            fresh: false,
            linger: Duration::from_secs(1),
            settings: Vec::new(),
        }
    }

    /// Sets the folder of the PostgreSQL programs (default: [`Programs::find`]).
    pub fn programs(mut self, bin: impl Into<PathBuf>) -> ClusterOptions {
        self.programs = Some(bin.into());
        self
    }

    /// Sets whether data survives a crash of the machine (default `true`). Turn it off for faster tests.
    pub fn durable(mut self, durable: bool) -> ClusterOptions {
        self.durable = durable;
        self
    }

    /// Sets whether to delete the data of earlier runs (default `false`), also of another PostgreSQL version.
    /// Current users lose the server.
    pub fn fresh(mut self, fresh: bool) -> ClusterOptions {
        self.fresh = fresh;
        self
    }

    /// Sets how long the server keeps running without users (default and minimum: 1 second).
    pub fn linger(mut self, linger: Duration) -> ClusterOptions {
        self.linger = linger;
        self
    }

    /// Adds a setting of postgresql.conf. Takes effect when the server next starts.
    pub fn setting(mut self, name: impl Into<String>, value: impl Into<String>) -> ClusterOptions {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// Creates the folder if needed, starts the server if it is not running, and registers as a user.
    pub fn open(self) -> Result<Cluster, Error> {
        let folder = self.prepare()?;
        let _only_us = folder.lock()?;
        if self.fresh {
            folder.discard_cluster()?;
        }
        folder.create_cluster()?;
        let registration = folder.register(&self)?;
        let port = match folder.running_port()? {
            Some(port) => port,
            None => folder.start_server(&self)?,
        };
        let password = fs::read_to_string(folder.path.join("password")).context(|| "read the password".to_owned())?;
        Ok(Cluster { port, password, registration: Arc::new(registration), folder })
    }

    /// Creates the folder if needed.
    pub(crate) fn prepare(&self) -> Result<Folder, Error> {
        let programs = match &self.programs {
            Some(bin) => Programs::in_folder(bin)?,
            None => Programs::find()?,
        };
        Folder::prepare(&self.folder, ServerUser::choose()?, programs)
    }
}

/// A running private PostgreSQL. The server stops soon after the last handle is dropped, or the last process
/// with one ends.
#[derive(Debug)]
pub struct Cluster {
    pub(crate) port: u16,
    pub(crate) password: String,
    pub(crate) registration: Arc<Registration>,
    pub(crate) folder: Folder,
}

impl Cluster {
    /// Opens the cluster in `folder`, and creates it if needed: durable, listening on a free port of the
    /// loopback interface and on a Unix socket that only its owner can reach.
    pub fn open(folder: impl Into<PathBuf>) -> Result<Cluster, Error> {
        ClusterOptions::new(folder).open()
    }

    /// The URL of a database of the cluster in this folder, if its server is running. Does not start it or
    /// keep it running.
    pub fn url_if_running(folder: impl AsRef<Path>, database: &str) -> Option<String> {
        let folder = folder.as_ref();
        let port: u16 = fs::read_to_string(folder.join("port")).ok()?.trim().parse().ok()?;
        let password = fs::read_to_string(folder.join("password")).ok()?;
        let address = std::net::SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        std::net::TcpStream::connect_timeout(&address, Duration::from_secs(1)).ok()?;
        Some(format!("postgres://postgres:{password}@127.0.0.1:{port}/{database}"))
    }

    /// Opens the cluster shared by all test processes of this user, in the system's temporary folder: not
    /// durable, and kept for five seconds between two processes.
    pub fn for_tests() -> Result<Cluster, Error> {
        let name = format!("graphile-worker-tests-pg{}-{}", Programs::find()?.major(), current_user_id()?);
        ClusterOptions::new(std::env::temp_dir().join(name))
            .durable(false)
            .linger(Duration::from_secs(5))
            .setting("max_connections", "500")
            .setting("deadlock_timeout", "200ms")
            .open()
    }

    /// Options to connect to a database of this cluster over its Unix socket.
    pub fn options(&self, database: &str) -> PgConnectOptions {
        PgConnectOptions::new_without_pgpass()
            .socket(&self.folder.socket)
            .port(self.port)
            .username("postgres")
            .password(&self.password)
            .database(database)
    }

    /// The URL of a database over TCP, with the password.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres:{}@127.0.0.1:{}/{database}", self.password, self.port)
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder.path
    }

    /// Stops the server now, for all users.
    pub fn stop(self) -> Result<(), Error> {
        let _only_us = self.folder.lock()?;
        self.folder.pg_ctl(&["stop", "-m", "fast", "-w"])?;
        if !self.folder.socket.starts_with(&self.folder.path) {
            let _ = fs::remove_dir_all(&self.folder.socket);
        }
        Ok(())
    }

    /// Kills the server and all its processes with SIGKILL, like a crash of its machine, and returns when
    /// they have ended. On systems without `/proc`, runs PostgreSQL's immediate shutdown instead.
    pub fn kill(&self) -> Result<(), Error> {
        let _only_us = self.folder.lock()?;
        if !Path::new("/proc/self/stat").exists() {
            return self.folder.pg_ctl(&["stop", "-m", "immediate", "-w"]);
        }
        let Some(postmaster) = self.folder.postmaster() else { return Ok(()) };
        // A stopped postmaster starts no more processes, which would survive it.
        signal("STOP", &[postmaster])?;
        let processes = [children_of(postmaster), vec![postmaster]].concat();
        signal("KILL", &processes)?;
        let deadline = Instant::now() + START_TIMEOUT;
        while processes.iter().any(|process| is_alive(*process)) {
            if Instant::now() > deadline {
                return Err(Error::Program { program: "postgres", output: "killed, but still running".to_owned() });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        // Another process may soon reuse its id.
        let _ = fs::remove_file(self.folder.data().join("postmaster.pid"));
        Ok(())
    }
}

/// A file in `users/`, as long as a handle is open.
#[derive(Debug)]
pub(crate) struct Registration(PathBuf);

impl Registration {
    fn new(users: &Path) -> std::io::Result<Registration> {
        static HANDLES: AtomicU32 = AtomicU32::new(0);
        let handle = HANDLES.fetch_add(1, Ordering::Relaxed);
        let file = users.join(format!("{}-{handle}", std::process::id()));
        File::create(&file)?;
        Ok(Registration(file))
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    socket: PathBuf,
    pub(crate) server_user: ServerUser,
    pub(crate) programs: Programs,
}

impl Folder {
    fn prepare(path: &Path, server_user: ServerUser, programs: Programs) -> Result<Folder, Error> {
        fs::create_dir_all(path).context(|| format!("create {}", path.display()))?;
        reject_foreign(path, &server_user)?;
        let path = path.canonicalize().context(|| format!("find {}", path.display()))?;
        // The path of a socket is limited to 104 bytes on macOS and 108 on Linux.
        let socket = if path.as_os_str().len() < 70 {
            path.join("server")
        } else {
            std::env::temp_dir().join(format!("graphile-worker-{}", short_hash(&path.to_string_lossy())))
        };
        let folder = Folder { path, socket, server_user, programs };
        let for_all_to_enter = matches!(folder.server_user, ServerUser::Other { .. });
        set_mode(&folder.path, if for_all_to_enter { 0o711 } else { 0o700 })?;
        for private in [&folder.server(), &folder.socket] {
            fs::create_dir_all(private).context(|| format!("create {}", private.display()))?;
            reject_foreign(private, &folder.server_user)?;
            set_mode(private, 0o700)?;
            if let ServerUser::Other { name, uid, gid } = &folder.server_user {
                chown(private, Some(*uid), Some(*gid)).context(|| format!("give {} to {name}", private.display()))?;
            }
        }
        if let ServerUser::Other { name, uid, .. } = &folder.server_user {
            for ancestor in folder.path.ancestors() {
                let metadata =
                    fs::metadata(ancestor).context(|| format!("read the metadata of {}", ancestor.display()))?;
                if metadata.mode() & 0o001 == 0 && metadata.uid() != *uid {
                    return Err(Error::Unreachable { user: name.clone(), blocked: ancestor.to_owned() });
                }
            }
        }
        Ok(folder)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The folder owned by the user that runs the server.
    pub(crate) fn server(&self) -> PathBuf {
        self.path.join("server")
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.server().join("data")
    }

    pub(crate) fn users(&self) -> PathBuf {
        self.path.join("users")
    }

    /// Waits until no other process starts, stops or installs anything here.
    pub(crate) fn lock(&self) -> Result<File, Error> {
        let path = self.path.join("lock");
        let file = File::create(&path).context(|| format!("create {}", path.display()))?;
        file.lock().context(|| format!("lock {}", path.display()))?;
        Ok(file)
    }

    /// Stops the server and deletes its data. A killed server leaves its files; pg_ctl detects that.
    pub(crate) fn discard_cluster(&self) -> Result<(), Error> {
        let data = self.data();
        if !data.exists() {
            return Ok(());
        }
        if self.running_port()?.is_some() {
            self.pg_ctl(&["stop", "-m", "fast", "-w"])?;
        }
        // Renamed first, so that a half-deleted folder is not mistaken for a cluster.
        let discarded = self.server().join("data.unfinished");
        let _ = fs::remove_dir_all(&discarded);
        fs::rename(&data, &discarded).context(|| format!("rename {}", data.display()))?;
        fs::remove_dir_all(&discarded).context(|| format!("remove {}", discarded.display()))
    }

    /// Runs initdb, unless the cluster exists. It works in a temporary folder that is renamed at the end, so
    /// that an interrupted run is discarded.
    fn create_cluster(&self) -> Result<(), Error> {
        let data = self.data();
        if let Ok(version) = fs::read_to_string(data.join("PG_VERSION")) {
            if version.trim() != self.programs.major() {
                return Err(Error::VersionMismatch {
                    folder: self.path.clone(),
                    folder_version: version.trim().to_owned(),
                    programs: self.programs.bin().to_owned(),
                    programs_version: self.programs.major().to_owned(),
                });
            }
            return Ok(());
        }
        let password = random_hex()?;
        let unfinished = self.server().join("data.unfinished");
        let password_file = self.server().join("password.unfinished");
        let _ = fs::remove_dir_all(&unfinished);
        write_private(&self.path.join("password"), &password)?;
        write_private(&password_file, &password)?;
        if let ServerUser::Other { uid, gid, .. } = &self.server_user {
            chown(&password_file, Some(*uid), Some(*gid)).context(|| "give the password file to initdb".to_owned())?;
        }
        let mut initdb = self.programs.command("initdb", &self.server_user);
        initdb
            .arg("--pgdata")
            .arg(&unfinished)
            .arg("--pwfile")
            .arg(&password_file)
            // Only its owner can enter the socket's folder; every local user can connect over TCP.
            .args(["--username=postgres", "--auth-local=trust", "--auth-host=scram-sha-256"])
            .args(["--encoding=UTF8", "--no-locale", "--no-sync"]);
        run("initdb", initdb)?;
        fs::remove_file(&password_file).context(|| "remove initdb's password file".to_owned())?;
        fs::rename(&unfinished, &data).context(|| "rename the new cluster".to_owned())
    }

    /// Registers as a user of the server, so that its watchdog keeps it running. If the watchdog has just
    /// decided to stop the server, waits for that and starts a new watchdog.
    fn register(&self, options: &ClusterOptions) -> Result<Registration, Error> {
        let users = self.users();
        if let Ok(registration) = Registration::new(&users) {
            if let Some(lock) = self.lock_of_watchdog()? {
                self.start_watchdog(lock, options)?;
            }
            return Ok(registration);
        }
        let deadline = Instant::now() + START_TIMEOUT;
        let mut lock = None;
        while Instant::now() < deadline {
            // Until the watchdog ends, it may stop a server, even a newly started one.
            lock = self.lock_of_watchdog()?;
            if lock.is_some() && self.running_port()?.is_none() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        fs::create_dir_all(&users).context(|| format!("create {}", users.display()))?;
        let registration = Registration::new(&users).context(|| format!("write to {}", users.display()))?;
        if let Some(lock) = lock {
            self.start_watchdog(lock, options)?;
        }
        Ok(registration)
    }

    /// A watchdog holds this lock, on its standard input, until it ends. `None` while one runs.
    fn lock_of_watchdog(&self) -> Result<Option<File>, Error> {
        let path = self.path.join("watchdog");
        let file = File::create(&path).context(|| format!("create {}", path.display()))?;
        Ok(file.try_lock().is_ok().then_some(file))
    }

    /// The watchdog runs as the current user, not as the server's, so that it can see our processes.
    fn start_watchdog(&self, alive: File, options: &ClusterOptions) -> Result<(), Error> {
        let child = Command::new("sh")
            .args(["-c", include_str!("watchdog.sh"), "watchdog"])
            .arg(self.users())
            .arg(options.linger.as_secs().max(1).to_string())
            .arg(self.data())
            .current_dir("/")
            .stdin(alive)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context(|| "start the watchdog".to_owned())?;
        reap(child);
        Ok(())
    }

    /// The port of the running server. PostgreSQL writes it to line 4 of postmaster.pid, and `ready` to line
    /// 8 once it accepts connections. pg_ctl detects a file left by a killed server.
    fn running_port(&self) -> Result<Option<u16>, Error> {
        let Some((port, _)) = self.postmaster_file() else {
            return Ok(None);
        };
        match self.pg_ctl(&["status"]) {
            Ok(()) => Ok(Some(port)),
            Err(Error::Program { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The server's process. Ignores the file of a killed server.
    fn postmaster(&self) -> Option<u32> {
        let text = fs::read_to_string(self.data().join("postmaster.pid")).ok()?;
        text.lines().next()?.trim().parse().ok().filter(|process| is_alive(*process))
    }

    fn postmaster_file(&self) -> Option<(u16, bool)> {
        let text = fs::read_to_string(self.data().join("postmaster.pid")).ok()?;
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        Some((lines.get(3)?.parse().ok()?, lines.get(7) == Some(&"ready")))
    }

    /// Starts the server on a free port. If another process takes the port first, the server exits, and we
    /// try another.
    fn start_server(&self, options: &ClusterOptions) -> Result<u16, Error> {
        let mut attempts_left = 5;
        let mut port = self.usual_port();
        loop {
            attempts_left -= 1;
            let port = match port.take() {
                Some(port) => port,
                None => free_port()?,
            };
            match self.try_start_server(port, options) {
                Ok(()) => {
                    fs::write(self.path.join("port"), port.to_string()).context(|| "save the port".to_owned())?;
                    return Ok(port);
                }
                Err(Error::Program { output, .. })
                    if attempts_left > 0 && output.contains("Address already in use") => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The port of the last run, if it is free, so that saved URLs stay valid.
    fn usual_port(&self) -> Option<u16> {
        let port = fs::read_to_string(self.path.join("port")).ok()?.trim().parse().ok()?;
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok().map(|_| port)
    }

    fn try_start_server(&self, port: u16, options: &ClusterOptions) -> Result<(), Error> {
        // The file of a killed server would look as if this one were ready.
        let _ = fs::remove_file(self.data().join("postmaster.pid"));
        let log_path = self.path.join("server.log");
        let log = File::create(&log_path).context(|| format!("create {}", log_path.display()))?;
        let log_again = log.try_clone().context(|| "share the log".to_owned())?;
        let mut server = self.programs.command("postgres", &self.server_user);
        server.arg("-D").arg(self.data()).arg("-p").arg(port.to_string()).arg("-k").arg(&self.socket);
        server.args(["-c", "listen_addresses=127.0.0.1"]);
        if !options.durable {
            for setting in ["fsync=off", "synchronous_commit=off", "full_page_writes=off"] {
                server.args(["-c", setting]);
            }
        }
        for (name, value) in &options.settings {
            server.arg("-c").arg(format!("{name}={value}"));
        }
        // In its own process group: Ctrl-C in a terminal is meant for us, not for the server.
        let mut child =
            server.stdout(log).stderr(log_again).process_group(0).spawn().context(|| "start postgres".to_owned())?;

        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if self.postmaster_file() == Some((port, true)) {
                reap(child);
                return Ok(());
            }
            let exited = child.try_wait().context(|| "watch postgres".to_owned())?.is_some();
            if exited || Instant::now() > deadline {
                let _ = child.kill();
                let output = last_lines(&fs::read(&log_path).unwrap_or_default());
                return Err(Error::Program { program: "postgres", output });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn pg_ctl(&self, arguments: &[&str]) -> Result<(), Error> {
        let mut pg_ctl = self.programs.command("pg_ctl", &self.server_user);
        pg_ctl.args(arguments).arg("-D").arg(self.data());
        run("pg_ctl", pg_ctl)
    }

    /// The processes with a handle to this cluster.
    pub(crate) fn live_users(&self) -> Vec<u32> {
        let entries = fs::read_dir(self.users()).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.split('-').next()?.parse().ok()).collect()
    }
}

/// Rejects a folder, or a link, that another user has put in this place: as root we would give it away.
fn reject_foreign(folder: &Path, server_user: &ServerUser) -> Result<(), Error> {
    let metadata = fs::symlink_metadata(folder).context(|| format!("read the metadata of {}", folder.display()))?;
    let mut owners = vec![current_user_id()?];
    if let ServerUser::Other { uid, .. } = server_user {
        owners.push(*uid);
    }
    if metadata.is_dir() && owners.contains(&metadata.uid()) {
        return Ok(());
    }
    Err(Error::ForeignFolder { folder: folder.to_owned() })
}

fn set_mode(folder: &Path, mode: u32) -> Result<(), Error> {
    fs::set_permissions(folder, Permissions::from_mode(mode))
        .context(|| format!("close {} to others", folder.display()))
}

/// FNV-1a: a short, well-distributed name for any text.
pub(crate) fn short_hash(text: &str) -> String {
    let hash = text
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    format!("{hash:016x}")
}

fn signal(name: &str, processes: &[u32]) -> Result<(), Error> {
    let mut kill = Command::new("sh");
    // Some may have ended by themselves.
    kill.args(["-c", r#"kill -s "$0" "$@" 2>/dev/null; true"#, name]).args(processes.iter().map(u32::to_string));
    run("kill", kill)
}

fn children_of(process: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap_or_default();
    children.split_whitespace().filter_map(|child| child.parse().ok()).collect()
}

/// Whether the process exists and is not a zombie.
fn is_alive(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// Waits for a process in the background: without that, an ended process still looks alive.
fn reap(mut child: Child) {
    std::thread::spawn(move || child.wait());
}

pub(crate) fn free_port() -> Result<u16, Error> {
    let listener =
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context(|| "find a free port on 127.0.0.1".to_owned())?;
    Ok(listener.local_addr().context(|| "find a free port on 127.0.0.1".to_owned())?.port())
}

pub(crate) fn random_hex() -> Result<String, Error> {
    use std::io::Read;
    let mut bytes = [0_u8; 16];
    File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut bytes))
        .context(|| "read /dev/urandom".to_owned())?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

pub(crate) fn write_private(path: &Path, text: &str) -> Result<(), Error> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let _ = fs::remove_file(path);
    fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .context(|| format!("write {}", path.display()))
}

fn run(program: &'static str, mut command: Command) -> Result<(), Error> {
    let output = command.output().context(|| format!("run {program}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::Program { program, output: last_lines(&[output.stdout, output.stderr].concat()) })
}

pub(crate) fn last_lines(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    let lines: Vec<&str> = text.trim().lines().collect();
    lines[lines.len().saturating_sub(5)..].join("\n")
}
