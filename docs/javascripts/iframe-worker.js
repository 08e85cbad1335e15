// Browsers refuse workers in pages from the file system. The search is one: it runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      // the worker posts to its parent; what it loads further comes as scripts
      this.inside.document.write(`<script>
        postMessage = data => parent.dispatchEvent(new MessageEvent("worker", { data }))
        importScripts = (...urls) => Promise.all(urls.map(url => new Promise((done, failed) => {
          const script = document.createElement("script")
          Object.assign(script, { src: url, onload: done, onerror: failed })
          document.head.append(script)
        })))
      <\/script><script src="${url}"><\/script>`)
      this.inside.document.close()
      this.ready = new Promise(done => frame.addEventListener("load", done, { once: true }))
      addEventListener("worker", event => this.dispatchEvent(new MessageEvent("message", { data: event.data })))
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {}
  }
  window.Worker = window.IFrameWorker
}
// An option is typed with its dashes. For the search a leading dash means "without this word".
window.Worker = class extends window.Worker {
  postMessage(message) {
    if (typeof message?.data === "string") message.data = message.data.replace(/(^|\s)-+(?=\w)/g, "$1")
    super.postMessage(message)
  }
}
