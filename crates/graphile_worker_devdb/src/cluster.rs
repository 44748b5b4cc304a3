//! A cluster in a folder: made once, started when somebody needs it, shared by whoever comes, stopped
//! when the last one has gone. What is in the folder:
//!
//! ```text
//! lock          held (flock) while a process looks whether the server runs, and starts it
//! users/        a file for each handle that is open, named after its process
//! watchdog      held (flock) by the watchdog for as long as it runs
//! password      of the superuser, for connections over TCP
//! port          on which the server ran last, and runs again if nobody else has taken it
//! server.log
//! server/       belongs to the user the server runs as: data/, and the socket where the path is short
//! ```
//!
//! Nobody has to stop the server: a small shell script (watchdog.sh) does, once no process named in
//! `users/` is alive. So a killed owner leaves nothing running, and test processes that come one after
//! the other find the server still warm.

use crate::Error;
use crate::error::Doing;
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

const START_TIMEOUT: Duration = Duration::from_secs(60);

/// How a cluster is to run; see [`Cluster::open`] for the defaults.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    folder: PathBuf,
    programs: Option<PathBuf>,
    durable: bool,
    fresh: bool,
    linger: Duration,
    settings: Vec<(String, String)>,
}

impl ClusterOptions {
    /// A cluster in `folder`, with PostgreSQL's own defaults.
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

    /// The folder of the PostgreSQL programs (default: [`Programs::find`]).
    pub fn programs(mut self, bin: impl Into<PathBuf>) -> ClusterOptions {
        self.programs = Some(bin.into());
        self
    }

    /// Whether data must survive a crash of the machine (default `true`). Tests are faster without.
    pub fn durable(mut self, durable: bool) -> ClusterOptions {
        self.durable = durable;
        self
    }

    /// Whether to throw away the data of earlier runs (default `false`), also of another version of PostgreSQL. Whoever
    /// uses the server loses it.
    pub fn fresh(mut self, fresh: bool) -> ClusterOptions {
        self.fresh = fresh;
        self
    }

    /// How long the server stays after its last user has gone (default 1 second, at least that).
    pub fn linger(mut self, linger: Duration) -> ClusterOptions {
        self.linger = linger;
        self
    }

    /// A setting of postgresql.conf. Takes effect when the server is next started.
    pub fn setting(mut self, name: impl Into<String>, value: impl Into<String>) -> ClusterOptions {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// Makes the folder if it is new, starts the server if it is not running, and joins its users.
    pub fn open(self) -> Result<Cluster, Error> {
        let programs = match &self.programs {
            Some(bin) => Programs::in_folder(bin)?,
            None => Programs::find()?,
        };
        let server_user = ServerUser::choose()?;
        let folder = Folder::prepare(&self.folder, server_user, programs)?;
        let _only_us = folder.lock()?;
        if self.fresh {
            folder.discard_cluster()?;
        }
        folder.make_cluster()?;
        let registration = folder.register(&self)?;
        let port = match folder.running_port()? {
            Some(port) => port,
            None => folder.start_server(&self)?,
        };
        let password = fs::read_to_string(folder.path.join("password")).doing(|| "read the password".to_owned())?;
        Ok(Cluster { port, password, registration: Arc::new(registration), folder })
    }
}

/// A running PostgreSQL that is ours. The server stops soon after the last handle is dropped or the
/// last process that has one ends.
#[derive(Debug)]
pub struct Cluster {
    port: u16,
    password: String,
    pub(crate) registration: Arc<Registration>,
    pub(crate) folder: Folder,
}

impl Cluster {
    /// The cluster in `folder`, made if it is new: durable, listening on a free port of the loopback
    /// interface and on a unix socket that only its owner can reach.
    pub fn open(folder: impl Into<PathBuf>) -> Result<Cluster, Error> {
        ClusterOptions::new(folder).open()
    }

    /// The URL of a database of the cluster in this folder, if its server runs. Starts nothing, and does not keep it running.
    pub fn url_if_running(folder: impl AsRef<Path>, database: &str) -> Option<String> {
        let folder = folder.as_ref();
        let port: u16 = fs::read_to_string(folder.join("port")).ok()?.trim().parse().ok()?;
        let password = fs::read_to_string(folder.join("password")).ok()?;
        let address = std::net::SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        std::net::TcpStream::connect_timeout(&address, Duration::from_secs(1)).ok()?;
        Some(format!("postgres://postgres:{password}@127.0.0.1:{port}/{database}"))
    }

    /// The cluster that all test processes of this user share, in the system's folder for temporary
    /// files: not durable, lingering for five seconds between two processes.
    pub fn for_tests() -> Result<Cluster, Error> {
        let name = format!("graphile-worker-tests-pg{}-{}", Programs::find()?.major(), current_user_id()?);
        ClusterOptions::new(std::env::temp_dir().join(name))
            .durable(false)
            .linger(Duration::from_secs(5))
            .setting("max_connections", "500")
            .setting("deadlock_timeout", "200ms")
            .open()
    }

    /// How to connect to a database of this cluster, over its unix socket.
    pub fn options(&self, database: &str) -> PgConnectOptions {
        PgConnectOptions::new_without_pgpass()
            .socket(&self.folder.socket)
            .port(self.port)
            .username("postgres")
            .password(&self.password)
            .database(database)
    }

    /// The same for programs that want a URL, over TCP, with the password in it.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres:{}@127.0.0.1:{}/{database}", self.password, self.port)
    }

    /// The folder it lives in.
    pub fn folder(&self) -> &Path {
        &self.folder.path
    }

    /// Stops the server now, for everybody who uses it.
    pub fn stop(self) -> Result<(), Error> {
        let _only_us = self.folder.lock()?;
        self.folder.pg_ctl(&["stop", "-m", "fast", "-w"])?;
        if !self.folder.socket.starts_with(&self.folder.path) {
            let _ = fs::remove_dir_all(&self.folder.socket);
        }
        Ok(())
    }
}

/// A file in `users/`, for as long as a handle is open.
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
    server_user: ServerUser,
    programs: Programs,
}

impl Folder {
    fn prepare(path: &Path, server_user: ServerUser, programs: Programs) -> Result<Folder, Error> {
        fs::create_dir_all(path).doing(|| format!("make {}", path.display()))?;
        refuse_foreign(path, &server_user)?;
        let path = path.canonicalize().doing(|| format!("find {}", path.display()))?;
        // The kernel takes at most 104 bytes (macOS; Linux 108) for the name of a socket.
        let socket = if path.as_os_str().len() < 70 {
            path.join("server")
        } else {
            std::env::temp_dir().join(format!("graphile-worker-{}", short_hash(&path.to_string_lossy())))
        };
        let folder = Folder { path, socket, server_user, programs };
        let for_all_to_enter = matches!(folder.server_user, ServerUser::Other { .. });
        set_mode(&folder.path, if for_all_to_enter { 0o711 } else { 0o700 })?;
        for private in [&folder.server(), &folder.socket] {
            fs::create_dir_all(private).doing(|| format!("make {}", private.display()))?;
            refuse_foreign(private, &folder.server_user)?;
            set_mode(private, 0o700)?;
            if let ServerUser::Other { name, uid, gid } = &folder.server_user {
                chown(private, Some(*uid), Some(*gid)).doing(|| format!("give {} to {name}", private.display()))?;
            }
        }
        if let ServerUser::Other { name, uid, .. } = &folder.server_user {
            for ancestor in folder.path.ancestors() {
                let metadata = fs::metadata(ancestor).doing(|| format!("look at {}", ancestor.display()))?;
                if metadata.mode() & 0o001 == 0 && metadata.uid() != *uid {
                    return Err(Error::Unreachable { user: name.clone(), blocked: ancestor.to_owned() });
                }
            }
        }
        Ok(folder)
    }

    /// What belongs to the user the server runs as.
    fn server(&self) -> PathBuf {
        self.path.join("server")
    }

    fn data(&self) -> PathBuf {
        self.server().join("data")
    }

    pub(crate) fn users(&self) -> PathBuf {
        self.path.join("users")
    }

    /// Waits until no other process starts, stops or installs something here.
    pub(crate) fn lock(&self) -> Result<File, Error> {
        let path = self.path.join("lock");
        let file = File::create(&path).doing(|| format!("make {}", path.display()))?;
        file.lock().doing(|| format!("lock {}", path.display()))?;
        Ok(file)
    }

    /// Stops the server and removes its data. A killed server leaves its files; pg_ctl tells.
    fn discard_cluster(&self) -> Result<(), Error> {
        let data = self.data();
        if !data.exists() {
            return Ok(());
        }
        if self.running_port()?.is_some() {
            self.pg_ctl(&["stop", "-m", "fast", "-w"])?;
        }
        // Renamed first: what is removed half way is not taken for a cluster.
        let discarded = self.server().join("data.unfinished");
        let _ = fs::remove_dir_all(&discarded);
        fs::rename(&data, &discarded).doing(|| format!("set {} aside", data.display()))?;
        fs::remove_dir_all(&discarded).doing(|| format!("remove {}", discarded.display()))
    }

    /// initdb, unless it was done before. It works in a folder of its own that is renamed at the end:
    /// one that was killed half way is thrown away.
    fn make_cluster(&self) -> Result<(), Error> {
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
            chown(&password_file, Some(*uid), Some(*gid)).doing(|| "hand the password to initdb".to_owned())?;
        }
        let mut initdb = self.programs.command("initdb", &self.server_user);
        initdb
            .arg("--pgdata")
            .arg(&unfinished)
            .arg("--pwfile")
            .arg(&password_file)
            // The socket's folder can be entered by its owner only; TCP can be reached by everybody here.
            .args(["--username=postgres", "--auth-local=trust", "--auth-host=scram-sha-256"])
            .args(["--encoding=UTF8", "--no-locale", "--no-sync"]);
        run("initdb", initdb)?;
        fs::remove_file(&password_file).doing(|| "remove initdb's password file".to_owned())?;
        fs::rename(&unfinished, &data).doing(|| "keep what initdb made".to_owned())
    }

    /// Joins the users of the server, whose watchdog then keeps it running. Where the watchdog has just
    /// decided to stop it, waits for that and sets up a new one.
    fn register(&self, options: &ClusterOptions) -> Result<Registration, Error> {
        let users = self.users();
        if let Ok(registration) = Registration::new(&users) {
            self.ensure_watchdog(options)?;
            return Ok(registration);
        }
        let patience = Instant::now() + START_TIMEOUT;
        while self.running_port()?.is_some() && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(20));
        }
        fs::create_dir_all(&users).doing(|| format!("make {}", users.display()))?;
        let registration = Registration::new(&users).doing(|| format!("write to {}", users.display()))?;
        self.ensure_watchdog(options)?;
        Ok(registration)
    }

    /// Runs the watchdog unless one is running: that one holds a lock, on the file that is its standard input,
    /// until it ends. It runs as we do, not as the server does, so that it can see our processes.
    fn ensure_watchdog(&self, options: &ClusterOptions) -> Result<(), Error> {
        let path = self.path.join("watchdog");
        let alive = File::create(&path).doing(|| format!("make {}", path.display()))?;
        if alive.try_lock().is_err() {
            return Ok(());
        }
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
            .doing(|| "start the watchdog".to_owned())?;
        reap(child);
        Ok(())
    }

    /// The port of the running server. PostgreSQL writes it into postmaster.pid (line 4), with `ready`
    /// on line 8 once it accepts connections; a file left by a killed server is told apart by pg_ctl.
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

    fn postmaster_file(&self) -> Option<(u16, bool)> {
        let text = fs::read_to_string(self.data().join("postmaster.pid")).ok()?;
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        Some((lines.get(3)?.parse().ok()?, lines.get(7) == Some(&"ready")))
    }

    /// Starts the server on a free port. Somebody may take the port between our look and its start;
    /// then it exits, and we look again.
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
                    fs::write(self.path.join("port"), port.to_string()).doing(|| "note the port".to_owned())?;
                    return Ok(port);
                }
                Err(Error::Program { output, .. })
                    if attempts_left > 0 && output.contains("Address already in use") => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The port of the last time, if it is free: whoever has written it down finds the server again.
    fn usual_port(&self) -> Option<u16> {
        let port = fs::read_to_string(self.path.join("port")).ok()?.trim().parse().ok()?;
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok().map(|_| port)
    }

    fn try_start_server(&self, port: u16, options: &ClusterOptions) -> Result<(), Error> {
        // That of a server which was killed looks as if this one were ready.
        let _ = fs::remove_file(self.data().join("postmaster.pid"));
        let log_path = self.path.join("server.log");
        let log = File::create(&log_path).doing(|| format!("make {}", log_path.display()))?;
        let log_again = log.try_clone().doing(|| "share the log".to_owned())?;
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
        // A group of its own: Ctrl-C in a terminal is meant for us, not for the server.
        let mut child =
            server.stdout(log).stderr(log_again).process_group(0).spawn().doing(|| "start postgres".to_owned())?;

        let patience = Instant::now() + START_TIMEOUT;
        loop {
            if self.postmaster_file() == Some((port, true)) {
                reap(child);
                return Ok(());
            }
            let exited = child.try_wait().doing(|| "watch postgres".to_owned())?.is_some();
            if exited || Instant::now() > patience {
                let _ = child.kill();
                let output = last_lines(&fs::read(&log_path).unwrap_or_default());
                return Err(Error::Program { program: "postgres", output });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn pg_ctl(&self, arguments: &[&str]) -> Result<(), Error> {
        let mut pg_ctl = self.programs.command("pg_ctl", &self.server_user);
        pg_ctl.args(arguments).arg("-D").arg(self.data());
        run("pg_ctl", pg_ctl)
    }

    /// The processes that have a handle on this cluster.
    pub(crate) fn live_users(&self) -> Vec<u32> {
        let entries = fs::read_dir(self.users()).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.split('-').next()?.parse().ok()).collect()
    }
}

/// Somebody may have put a folder of their own, or a link to one of ours, where ours is to be: as root we would
/// give it away.
fn refuse_foreign(folder: &Path, server_user: &ServerUser) -> Result<(), Error> {
    let metadata = fs::symlink_metadata(folder).doing(|| format!("look at {}", folder.display()))?;
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
    fs::set_permissions(folder, Permissions::from_mode(mode)).doing(|| format!("close {} to others", folder.display()))
}

/// FNV-1a: a short name for any text, which need not be more than well spread.
pub(crate) fn short_hash(text: &str) -> String {
    let hash = text
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    format!("{hash:016x}")
}

/// Waits for a process in the background: one that has ended and that nobody waited for still looks alive.
fn reap(mut child: Child) {
    std::thread::spawn(move || child.wait());
}

fn free_port() -> Result<u16, Error> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).doing(|| "find a free port on 127.0.0.1".to_owned())?;
    Ok(listener.local_addr().doing(|| "find a free port on 127.0.0.1".to_owned())?.port())
}

pub(crate) fn random_hex() -> Result<String, Error> {
    use std::io::Read;
    let mut bytes = [0_u8; 16];
    File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut bytes))
        .doing(|| "read /dev/urandom".to_owned())?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn write_private(path: &Path, text: &str) -> Result<(), Error> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let _ = fs::remove_file(path);
    fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .doing(|| format!("write {}", path.display()))
}

fn run(program: &'static str, mut command: Command) -> Result<(), Error> {
    let output = command.output().doing(|| format!("run {program}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::Program { program, output: last_lines(&[output.stdout, output.stderr].concat()) })
}

fn last_lines(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    let lines: Vec<&str> = text.trim().lines().collect();
    lines[lines.len().saturating_sub(5)..].join("\n")
}
