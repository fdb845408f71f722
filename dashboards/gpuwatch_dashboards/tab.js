export default function ({ setStateValue }) {
  let sent = false
  const send = () => {
    if (document.hidden !== sent) setStateValue("hidden", (sent = document.hidden))
  }
  document.addEventListener("visibilitychange", send)
  send()
  return () => document.removeEventListener("visibilitychange", send)
}
