//! The sockets and the thread of the relay, on systems that have local sockets.

use super::{KINDS, Keepalive, ROUTINE, Route, Trust};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::runtime::Runtime;
use tokio_rustls::TlsConnector;

/// How long connecting to the server may take. The driver gives up earlier, unless `connect_timeout` is longer.
const TIME_TO_CONNECT: Duration = Duration::from_secs(60);

/// How long sending the last bytes of a closed connection may take.
const TIME_TO_CLOSE: Duration = Duration::from_secs(5);

/// The message that requests TLS: its length, and a number in place of the protocol version.
const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];

/// A running relay: the thread, and the sockets on which it listens. Both stay until the process ends, because pools may use
/// them until then.
struct Relay {
    runtime: Runtime,
    folders: Mutex<HashMap<Route, PathBuf>>,
}

/// The folder of the socket that leads to this route, for the driver. The socket has the server's port.
pub(crate) fn folder(route: &Route) -> io::Result<PathBuf> {
    static RELAY: OnceLock<Result<Relay, String>> = OnceLock::new();
    let relay = RELAY.get_or_init(|| Relay::start().map_err(|error| error.to_string()));
    relay.as_ref().map_err(|error| io::Error::other(error.clone()))?.folder(route)
}

impl Relay {
    fn start() -> io::Result<Relay> {
        // A thread of its own: a handler that blocks the application's thread must not block the heartbeat.
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).thread_name("graphile_worker relay").enable_all().build()?;
        Ok(Relay { runtime, folders: Mutex::default() })
    }

    fn folder(&self, route: &Route) -> io::Result<PathBuf> {
        let mut folders = self.folders.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(folder) = folders.get(route) {
            return Ok(folder.clone());
        }
        let (folder, listener) = listen(route.port)?;
        listener.set_nonblocking(true)?;
        let _inside = self.runtime.enter();
        let listener = UnixListener::from_std(listener)?;
        self.runtime.spawn(accept(listener, route.clone()));
        folders.insert(route.clone(), folder.clone());
        Ok(folder)
    }
}

/// A socket with a random abstract name. There is no file, so nothing remains when the process ends.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn listen(port: u16) -> io::Result<(PathBuf, std::os::unix::net::UnixListener)> {
    use std::os::linux::net::SocketAddrExt;
    let folder = unguessable_name();
    let address = std::os::unix::net::SocketAddr::from_abstract_name(format!("{folder}/.s.PGSQL.{port}"))?;
    let listener = std::os::unix::net::UnixListener::bind_addr(&address)?;
    // The driver's runtime treats a leading NUL as an abstract name.
    Ok((format!("\0{folder}").into(), listener))
}

/// A socket in a folder that only this user can enter.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn listen(port: u16) -> io::Result<(PathBuf, std::os::unix::net::UnixListener)> {
    use std::os::unix::fs::DirBuilderExt;
    let folder = std::env::temp_dir().join(unguessable_name());
    std::fs::DirBuilder::new().mode(0o700).create(&folder)?;
    let listener = std::os::unix::net::UnixListener::bind(folder.join(format!(".s.PGSQL.{port}")))?;
    Ok((folder, listener))
}

fn unguessable_name() -> String {
    let random = || RandomState::new().hash_one(std::process::id());
    format!("graphile_worker-{:016x}{:016x}", random(), random())
}

async fn accept(listener: UnixListener, route: Route) {
    let route = Arc::new(route);
    loop {
        match listener.accept().await {
            Ok((client, _)) if is_this_process(&client) => drop(tokio::spawn(serve(client, route.clone()))),
            Ok(_) => {}
            // Usually too many open files: wait until some are closed.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// On systems that do not report the process of the peer, the permissions of the folder are the protection.
fn is_this_process(client: &UnixStream) -> bool {
    let Ok(peer) = client.peer_cred() else { return false };
    peer.pid().is_none_or(|pid| u32::try_from(pid) == Ok(std::process::id()))
}

async fn serve(mut client: UnixStream, route: Arc<Route>) {
    let connecting = tokio::time::timeout(TIME_TO_CONNECT, route.connect());
    match connecting.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
        Ok(server) => pass_on(client, server).await,
        Err(error) => {
            // The driver sends its first message at once, and would miss the answer while it is still writing.
            let _ = tokio::time::timeout(TIME_TO_CLOSE, client.read(&mut [0; 4096])).await;
            let _ = client.write_all(&message_about(&error)).await;
        }
    }
}

/// A stream to the server, with or without TLS.
trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

async fn pass_on(client: UnixStream, server: Box<dyn Connection>) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = tokio::io::split(server);
    let answers = async {
        // A server that rejects our certificate reports it only now. Later, an error could arrive in the middle of a message,
        // and the driver would read ours as a part of that message.
        let mut first = vec![0; 8192];
        match from_server.read(&mut first).await {
            Ok(length) if to_client.write_all(&first[..length]).await.is_ok() => {}
            Ok(_) => return,
            Err(error) => return drop(to_client.write_all(&message_about(&error)).await),
        }
        let _ = tokio::io::copy(&mut from_server, &mut to_client).await;
    };
    let questions = async {
        let _ = tokio::io::copy(&mut from_client, &mut to_server).await;
        let _ = tokio::time::timeout(TIME_TO_CLOSE, to_server.shutdown()).await;
    };
    tokio::select! {
        () = answers => {}
        () = questions => {}
    }
}

impl Route {
    async fn connect(&self) -> io::Result<Box<dyn Connection>> {
        let mut stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
        stream.set_nodelay(true)?;
        self.keepalive.apply(&stream);
        let Some(trust) = &self.trust else { return Ok(Box::new(stream)) };
        let config = trust.config()?;
        stream.write_all(&SSL_REQUEST).await?;
        match stream.read_u8().await? {
            b'S' => {}
            b'N' => return Err(io::Error::new(io::ErrorKind::Unsupported, "server does not support TLS")),
            other => return Err(io::Error::other(format!("unexpected answer {other:#04x} to a request for TLS"))),
        }
        let name = ServerName::try_from(self.host.clone()).map_err(io::Error::other)?;
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        Ok(Box::new(stream))
    }
}

impl Keepalive {
    /// Ignores errors: a connection works without these options, too.
    fn apply(&self, stream: &TcpStream) {
        use rustix::net::sockopt;
        let _ = sockopt::set_socket_keepalive(stream, self.is_on);
        #[cfg(not(any(target_os = "openbsd", target_os = "haiku", target_os = "nto")))]
        {
            let _ = sockopt::set_tcp_keepidle(stream, self.idle);
            let _ = sockopt::set_tcp_keepintvl(stream, self.interval);
            let _ = sockopt::set_tcp_keepcnt(stream, self.count);
        }
        #[cfg(any(target_os = "linux", target_os = "android"))]
        if let Some(timeout) = self.user_timeout {
            let _ = sockopt::set_tcp_user_timeout(stream, u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX));
        }
    }
}

impl Trust {
    /// Reads the files for each connection, because they may be replaced while the worker runs.
    fn config(&self) -> io::Result<ClientConfig> {
        let provider = Arc::new(ring::default_provider());
        let mut roots = RootCertStore::empty();
        for certificate in certificates("sslrootcert", &self.root_cert)? {
            roots.add(certificate).map_err(|error| unusable("sslrootcert", &self.root_cert, error))?;
        }
        if roots.is_empty() {
            return Err(unusable("sslrootcert", &self.root_cert, "it contains no certificate"));
        }
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone());
        let verifier = verifier.build().map_err(|error| unusable("sslrootcert", &self.root_cert, error))?;
        let verifier = Verifier { verifier, checks_name: self.checks_name };
        let config = with_versions(provider)?.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
        let Some((cert, key)) = &self.client_cert else { return Ok(config.with_no_client_auth()) };
        let chain = certificates("sslcert", cert)?;
        let private = PrivateKeyDer::from_pem_slice(&pem("sslkey", key)?);
        let private = private.map_err(|error| unusable("sslkey", key, error))?;
        config.with_client_auth_cert(chain, private).map_err(|error| unusable("sslcert", cert, error))
    }
}

fn with_versions(
    provider: Arc<CryptoProvider>,
) -> io::Result<rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier>> {
    ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().map_err(io::Error::other)
}

fn certificates(name: &str, text: &str) -> io::Result<Vec<CertificateDer<'static>>> {
    let pem = pem(name, text)?;
    CertificateDer::pem_slice_iter(&pem).collect::<Result<_, _>>().map_err(|error| unusable(name, text, error))
}

fn pem(name: &str, text: &str) -> io::Result<Vec<u8>> {
    if text.contains("-----BEGIN") {
        return Ok(text.into());
    }
    std::fs::read(text).map_err(|error| {
        io::Error::new(io::ErrorKind::InvalidInput, format!("{name} is {text:?}, which cannot be read: {error}"))
    })
}

fn unusable(name: &str, text: &str, error: impl std::fmt::Display) -> io::Error {
    // Not the text of a certificate or key, which may be secret.
    let file = if text.contains("-----BEGIN") { "a PEM text".to_owned() } else { format!("{text:?}") };
    io::Error::new(io::ErrorKind::InvalidInput, format!("{name} is {file}, which cannot be used: {error}"))
}

/// Verifies as webpki does. Without `checks_name`, accepts a certificate for any host.
#[derive(Debug)]
struct Verifier {
    verifier: Arc<WebPkiServerVerifier>,
    checks_name: bool,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        use CertificateError::{NotValidForName, NotValidForNameContext};
        match self.verifier.verify_server_cert(certificate, intermediates, name, ocsp_response, now) {
            // The name is checked last, so everything else is valid.
            Err(rustls::Error::InvalidCertificate(NotValidForName | NotValidForNameContext { .. }))
                if !self.checks_name =>
            {
                Ok(ServerCertVerified::assertion())
            }
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}

/// An error in the format of the server.
fn message_about(error: &io::Error) -> Vec<u8> {
    let kind = KINDS.iter().find(|(_, kind)| *kind == error.kind()).map_or("other", |(name, _)| name);
    // The driver's pool retries if the server is not ready yet.
    let code = if kind == "refused" { "57P03" } else { "08001" };
    let text = error.to_string().replace('\0', " ");
    let fields = format!("SFATAL\0VFATAL\0C{code}\0M{text}\0F{kind}\0R{ROUTINE}\0\0");
    let length = u32::try_from(fields.len() + 4).unwrap_or(u32::MAX);
    [b"E", &length.to_be_bytes()[..], fields.as_bytes()].concat()
}
