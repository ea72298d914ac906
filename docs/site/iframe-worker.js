// Search in pages that are opened from the file system. Browsers refuse to start a worker there, so the script of the worker
// runs in a hidden frame. On a server, this file does nothing.
//
// The script of the search finds `IFrameWorker` in its parent, and then reads the addresses of its own files from the frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);

      // A document that is written here has the origin of the page, unlike one that is loaded from a file.
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          script.src = source;
          script.addEventListener("load", resolve);
          script.addEventListener("error", reject);
          inside.document.body.append(script);
        });
      // The search loads a script for each of its languages, in this order.
      inside.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      this.ready = load(url);
    }

    async postMessage(data) {
      await this.ready;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
